"""Seeded texts with numbers, dates, money, units and addresses in English and Chinese."""

from __future__ import annotations

import random
from collections.abc import Callable

_Make = Callable[[random.Random], str]


def _integer(generator: random.Random) -> str:
    value = generator.choice(
        [generator.randint(0, 99), generator.randint(100, 9999), generator.randint(10**4, 10**7)]
    )
    return f"{value:,}" if generator.random() < 0.4 else str(value)


def _decimal(generator: random.Random) -> str:
    return f"{_integer(generator)}.{generator.randint(0, 99):02}"


def _number(generator: random.Random) -> str:
    return generator.choice([_integer, _decimal])(generator)


def _phone(generator: random.Random) -> str:
    digits = "".join(generator.choices("0123456789", k=8))
    return generator.choice(
        [f"138-{digits[:4]}-{digits[4:]}", f"010-{digits}", f"138{digits}", f"555-{digits[:4]}"]
    )


def _date(generator: random.Random) -> str:
    year, month, day = generator.randint(1950, 2030), generator.randint(1, 12), generator.randint(1, 28)
    return generator.choice([f"{year}-{month:02}-{day:02}", f"{year}/{month}/{day}", f"{year}.{month}.{day}"])


def _address(generator: random.Random) -> str:
    return f"192.168.{generator.randint(0, 255)}.{generator.randint(0, 255)}"


def _time(generator: random.Random) -> str:
    return f"{generator.randint(1, 12)}:{generator.randint(0, 59):02}"


_ENGLISH: tuple[_Make, ...] = (
    lambda g: f"The total is ${_number(g)} for the whole group.",
    lambda g: f"It weighs {_number(g)} kg, about {g.randint(1, 9)}/{g.randint(2, 9)} of the other one.",
    lambda g: f"Please call {_phone(g)} before {_time(g)} today!",
    lambda g: f"We met on {_date(g)} at {g.randint(1, 999)} Main Street, room {g.randint(1, 999)}.",
    lambda g: f"The server at {_address(g)} runs version {g.randint(1, 9)}.{g.randint(0, 20)}.",
    lambda g: f"Sales grew by {_number(g)}%, costs fell by {_decimal(g)} percent.",
    lambda g: f"Well, my dear friend, I think that you should see this, it costs £{_number(g)} only.",
    lambda g: (
        f"The {g.randint(2, 99)}th runner took {_decimal(g)} s; the next one needed {g.randint(1, 99)} ms more."
    ),
    lambda g: "So, as I said before, nothing of that kind has ever happened to us here, not once.",
    lambda g: f"It is -{g.randint(1, 30)} °C outside, {_integer(g)} km away: is that far?",
)
_CHINESE: tuple[_Make, ...] = (
    lambda g: f"这个东西的价格是{_number(g)}元，比去年便宜{g.randint(1, 50)}%。",
    lambda g: f"我们在{g.randint(1950, 2030)}年{g.randint(1, 12)}月{g.randint(1, 28)}日上午{_time(g)}开会。",
    lambda g: (
        f"他的电话是{_phone(g)}，地址是中山路{g.randint(1, 2000)}号{g.randint(1, 30)}栋{g.randint(101, 2999)}室。"
    ),
    lambda g: f"涨幅为{_decimal(g)}%，约占{g.randint(1, 9)}/{g.randint(2, 9)}，大家都很高兴！",
    lambda g: f"温度是-{g.randint(1, 30)}℃，速度{g.randint(1, 300)}km/h，距离{_number(g)}公里。",
    lambda g: f"好的，没问题，我马上告诉你：一共{_integer(g)}人，{g.randint(2, 9)}个小组。",
    lambda g: f"版本v{g.randint(1, 9)}.{g.randint(0, 9)}，IP是{_address(g)}。",
    lambda g: (
        f"日期是{_date(g)}；比分{g.randint(0, 9)}:{g.randint(0, 9)}，中国{g.randint(0, 5)}-{g.randint(0, 5)}日本。"
    ),
    lambda g: f"今天天气很好，我们走吧。{g.randint(2, 99)}个苹果、{g.randint(2, 99)}个梨，够了吗？",
    lambda g: f"总额约￥{_number(g)}，人均$ {_integer(g)}，听起来不少。",
)


def texts(count: int, seed: int) -> list[str]:
    """`count` texts of 1 to 4 sentences; some mix both languages."""
    generator = random.Random(seed)
    made = []
    for index in range(count):
        sentences = (_ENGLISH, _CHINESE, _ENGLISH + _CHINESE)[index % 3]
        chosen = [generator.choice(sentences)(generator) for _ in range(generator.randint(1, 4))]
        made.append(generator.choice(["", " "]).join(chosen) if index % 3 else " ".join(chosen))
    return made
