"""Text normalisation: the recorded official cases, and further texts for each rule."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from mingc.text.reference.chinese_grammar import verbalize_remaining_numbers
from mingc.text.reference.chinese_numerals import UnreadableNumberError, read_cardinal, read_telephone
from mingc.text.reference.chinese_rules import verbalize_numbers
from mingc.text.reference.chinese_tables import NARROW_CHARACTERS
from mingc.text.reference.english import (
    NumberTooLargeError,
    cardinal_words,
    expand_english_numbers,
    ordinal_words,
)
from mingc.text.reference.normalize import clean_up, has_chinese, normalize_fragment, normalize_text

DATA = Path(__file__).parents[1] / "data"
CASES: list[dict[str, Any]] = json.loads((DATA / "text.json").read_text(encoding="utf-8"))["cases"]


def name_of(case: dict[str, Any]) -> str:
    return str(case["text"][:24]) or "empty"


@pytest.mark.parametrize("case", CASES, ids=name_of)
def test_every_stage_matches_the_recorded_case(case: dict[str, Any]) -> None:
    text = case["text"]
    assert has_chinese(text) == case["is_chinese"]
    assert expand_english_numbers(text) == case["normalize_numbers_en"]
    assert clean_up(text) == case["preprocessed"]
    assert normalize_text(text) == case["talker_tn"]
    assert normalize_fragment(text) == case["pipeline"]


@pytest.mark.parametrize("case", [case for case in CASES if case["is_chinese"]], ids=name_of)
def test_the_first_stage_alone_matches_the_recorded_case(case: dict[str, Any]) -> None:
    assert verbalize_numbers(case["preprocessed"]) == case["talker_tn_without_wfst"]


@pytest.mark.parametrize(
    ("text", "spoken"),
    [
        ("日期2024-05-01，时间8:5", "日期二零二四年五月一号，时间八点零五分"),
        ("2023/12/31~2024/1/2放假", "二零二三年十二月三十一号至二零二四年一月二号放假"),
        ("会议2:30pm开始", "会议下午两点三十分开始"),
        ("用时1:02:03。", "用时一点零二分零三秒。"),
        ("客服400-123-4567", "客服四零零幺二三四五六七"),
        ("手机号13800138000", "手机号幺三八零零幺三八零零零"),
        ("版本1.2.3已发布", "版本一点二点三已发布"),
        ("V24.1.2已发布", "V二十四点一点二已发布"),
        ("v24.1.2已发布", "v二十四点一点二已发布"),
        ("算式3x4=12对吗", "算式三乘四等于十二对吗"),
        ("约2/3的人，5-8天", "约三分之二的人，五至八天"),
        ("增长3%-5%", "增长百分之三至百分之五"),
        ("-5℃到3℃", "负五摄氏度到三摄氏度"),
        ("有~30个", "有大约三十个"),
        ("价格99元", "价格九十九元"),
        ("工作了12年，到2012年", "工作了十二年，到二零一二年"),
        ("门票是120", "门票是一百二十"),
        ("售价$9.9", "售价九点九美元"),
        ("1万元和10012人", "一万元和一万十二人"),
        ("沪深300涨了", "沪深三百涨了"),
        ("第Ⅲ章①节", "第三章一节"),
        ("序列号AB12", "序列号AB幺二"),
        ("代码A1-B2-C3", "代码A幺杠B二杠C三"),
        ("共２０个", "共二十个"),
        ("1. 苹果", "一. 苹果"),
        ("号码５", "号码五"),
    ],
)
def test_chinese_numbers_are_read_by_their_context(text: str, spoken: str) -> None:
    assert normalize_text(text) == spoken


@pytest.mark.parametrize(
    ("text", "spoken"),
    [
        (
            "调频FM101.7",
            "调频FM一百零一点七",
        ),  # the first stage gives up on a decimal serial; the second stage reads it
        ("房间101", "房间幺零幺"),
        ("门牌1203号楼1204", "门牌一千两百零三号楼一千两百零四"),
        ("大约120000 km", "大约十两万千米"),
        ("90后喜欢B2B", "九零后喜欢B to B"),
        ("中国3-2胜日本", "中国三比二胜日本"),
        ("升级到v12", "升级到v一二"),
        ("ABC-7号机", "ABC负七号机"),
        ("比分１：０落后", "比分一点整落后"),
        ("５％（约）", "百分之五(约)"),
        ("電腦壞了3次", "电脑坏了三次"),
        ("从1, 234起", "从一千两百三十四起"),
    ],
)
def test_the_second_stage_reads_the_remaining_numbers(text: str, spoken: str) -> None:
    assert normalize_text(text) == spoken


def test_the_first_stage_keeps_numbers_without_a_matching_rule() -> None:
    assert verbalize_numbers("房间101") == "房间101"
    assert verbalize_numbers("调频FM101.7和3个") == "调频FM101.7和3个"


def test_only_the_listed_marks_become_narrow() -> None:
    assert verbalize_remaining_numbers("好？！；（）“”，。：、‘’【】") == '好?!;()""，。：、‘’【】'
    assert ord("，") not in NARROW_CHARACTERS


@pytest.mark.parametrize(
    ("text", "spoken"),
    [
        ("£1 and $-2", "one pound and minus two dollars"),
        ("£0.50 of £1.0", "zero point five zero pounds of one point zero pound"),
        ("2/3 or 1/2 or 3/2", "two third or one half or three halves"),
        ("101st", "one hundred and one"),
        ("gpt-101", "gpt one hundred and one"),
        ("101", "one hundred one"),
        ("5.05 KB at 3kHz", "five point zero five kilobytes at three kilohertz"),
        ("a -7 b", "a - seven b"),
        ("-12.5% now", "minus twelve point five percent now"),
        ("1.2.3%", "one point two . three percent"),
        ("only .5% left", "only zero point five percent left"),
        ("1,000,000", "one million"),
        ("3pm 25.5x", "3pm twenty-five .5x"),
    ],
)
def test_english_numbers(text: str, spoken: str) -> None:
    assert expand_english_numbers(text) == spoken


def words(text: str) -> list[str]:
    return text.split()


def test_every_english_unit_scale_and_ordinal_has_its_word() -> None:
    """SI and IEC names, and the names of powers of a thousand on the short scale."""
    units = {
        "ms": "milliseconds", "s": "seconds", "Hz": "hertz", "kHz": "kilohertz", "MHz": "megahertz", "GHz": "gigahertz",
        "KB": "kilobytes", "MB": "megabytes", "GB": "gigabytes", "TB": "terabytes", "bps": "bits per second",
        "kbps": "kilobits per second", "Mbps": "megabits per second", "Gbps": "gigabits per second",
        "cm": "centimeters", "km": "kilometers", "kg": "kilograms", "V": "volts", "A": "amperes", "W": "watts",
        "°C": "degrees celsius", "°F": "degrees fahrenheit",
    }  # fmt: skip
    for unit, word in units.items():
        assert (
            expand_english_numbers(f"at 2{unit} or 3.5 {unit}, ok")
            == f"at two {word} or three point five {word} , ok"
        )
    scales = (
        "thousand million billion trillion quadrillion quintillion sextillion septillion octillion nonillion"
    )
    for power, scale in enumerate([*words(scales), "decillion"], start=1):
        assert cardinal_words(7 * 1000**power) == f"seven {scale}"
    spelled = words(
        "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen "
        "seventeen eighteen nineteen twenty"
    )
    assert [cardinal_words(value) for value in range(21)] == spelled
    tens = words("twenty thirty forty fifty sixty seventy eighty ninety")
    assert [cardinal_words(value) for value in range(20, 100, 10)] == tens
    assert [cardinal_words(value) for value in range(23, 100, 10)] == [f"{ten}-three" for ten in tens]
    ordinals = words(
        "zeroth first second third fourth fifth sixth seventh eighth ninth tenth eleventh twelfth thirteenth "
        "fourteenth fifteenth sixteenth seventeenth eighteenth nineteenth twentieth"
    )
    assert [ordinal_words(value) for value in range(21)] == ordinals
    assert [ordinal_words(value) for value in (21, 32, 90)] == ["twenty-first", "thirty-second", "ninetieth"]


@pytest.mark.parametrize(
    ("text", "spoken"),
    [
        ("7/2, 1/4, 3/4, 1/1", "seven halves , one quarter , three quarters , one first"),
        (
            "$1, $1.00, $1.5 and £2",
            "one dollar , one point zero zero dollar , one point five dollars and two pounds",
        ),
        ("$-1", "minus one dollar"),
        ("1,000 and 12,34", "one thousand and one thousand, two hundred thirty-four"),
        ("2nd, 3rd, 4th and 121st", "two , three , four and one hundred and twenty-one"),
        ("v2.05 and GPT-4", "v two point zero five and GPT four"),
        ("v101.5", "v one hundred and one point five"),
        ("5 KB", "five kilobytes"),
        ("101/2, 101/103", "one hundred and one halves , one hundred and one one hundred and third"),
        ("$1.2.3 £1.2", "one point two . three dollars one point two pounds"),
        ("  many\n\tspaces  ", "many spaces"),
    ],
)
def test_forms_of_english_numbers(text: str, spoken: str) -> None:
    assert expand_english_numbers(text) == spoken


@pytest.mark.parametrize(
    ("value", "words", "ordinal"),
    [
        (0, "zero", "zeroth"),
        (12, "twelve", "twelfth"),
        (40, "forty", "fortieth"),
        (1001, "one thousand and one", "one thousand and first"),
        (1100, "one thousand, one hundred", "one thousand, one hundredth"),
        (2_000_019, "two million and nineteen", "two million and nineteenth"),
    ],
)
def test_cardinals_and_ordinals(value: int, words: str, ordinal: str) -> None:
    assert cardinal_words(value, with_and=True) == words
    assert cardinal_words(value) == words.replace(" and ", " ")
    assert ordinal_words(value) == ordinal


def test_a_number_beyond_the_named_scales_stays_as_digits() -> None:
    with pytest.raises(NumberTooLargeError, match="36 digits"):
        cardinal_words(10**36)
    digits = "9" * 37
    assert expand_english_numbers(f"x {digits} y") == f"x {digits} y"


@pytest.mark.parametrize(
    ("digits", "words"),
    [
        ("0", "零"),
        ("000", "零"),
        ("10", "十"),
        ("110", "一百一十"),
        ("202", "两百零二"),
        ("2000", "两千"),
        ("20000", "二万"),
        ("10012", "一万十二"),
        ("100000000", "一亿"),
    ],
)
def test_chinese_cardinals(digits: str, words: str) -> None:
    assert read_cardinal(digits) == words


@pytest.mark.parametrize(
    ("text", "spoken"),
    [
        # 两 before 百 and 千 only; zeros inside of a group of four are one 零, those in front of it none
        ("共2个", "共二个"),
        ("共12个", "共十二个"),
        ("共102个", "共一百零二个"),
        ("共220个", "共两百二十个"),
        ("共1002个", "共一千零二个"),
        ("共10020个", "共一万二十个"),
        ("共12345678个", "共一千两百三十四万五千六百七十八个"),
        ("共1000000000000个", "共一兆个"),
        # times of day
        ("8:00开始", "八点整开始"),
        ("02:00开始", "两点整开始"),
        ("12:00:05开始", "十二点零分零五秒开始"),
        ("8:10am开始", "上午八点十分开始"),
        ("8:10 PM", "八点十分 PM"),
        # sums
        ("3+4*5≥6", "三加四乘五大于等于六"),
        ("8÷4<=3", "八除四小于等于三"),
        ("1+1=2", "一加一等于二"),
        # addresses, fractions and telephones
        ("地址192.168.1.1", "地址幺九二点幺六八点幺点幺"),
        ("约2~3/4", "约二至四分之三"),
        ("010-12345678", "零幺零幺二三四五六七八"),
        ("0571-1234567", "零五七幺幺二三四五六七"),
        ("400-800-1234", "四零零八零零幺二三四"),
        # ranges join readings of one kind
        ("8:00-9:30", "八点整至九点三十分"),
        ("5元~8元", "五元至八元"),
        ("¥5-8元", "五元至八元"),
        ("~5%", "大约百分之五"),
        ("2024.5.1-2024.6.30", "二零二四年五月一号至二零二四年六月三十号"),
        ("5月12号", "五月十二号"),
        ("2024年5月12日", "二零二四年五月十二日"),
        ("2024年13月", "二零二四年十三月"),
        ("SN A12-B", "SN A幺二杠B"),
    ],
)
def test_forms_of_chinese_numbers(text: str, spoken: str) -> None:
    assert normalize_text(text, in_chinese=True) == spoken


@pytest.mark.parametrize(
    ("text", "spoken"),
    [
        # times: the hour 0, minutes below ten with 零, seconds without, half days in front
        ("在00:30到", "在零点三十分到"),
        ("02:00", "两点"),
        ("14:00", "十四点"),
        ("8:05:09am", "上午八点零五分九秒"),
        ("8:05 PM", "下午八点零五分"),
        ("10:30-11:00", "十点三十分到十一点"),
        # dates in five orders
        ("2024-05-01", "二零二四年五月一日"),
        ("01/05/2024", "二零二四年五月一日"),
        ("2024/05", "二零二四年五月"),
        ("05.2024", "二零二四年五月"),
        ("12-31", "十二月三十一日"),
        ("24-25赛季", "二四到二五赛季"),
        ("2023年-2024年", "二零二三年到二零二四年"),
        # measures: 两 before a unit, but not before a month or a day
        ("2个", "两个"),
        ("2月2号", "二月二号"),
        ("2-2月", "两到二月"),
        ("3-5个", "三到五个"),
        ("3个~5个", "三个到五个"),
        ("10km/h", "每小时十千米"),
        ("10 km / h", "每小时十千米"),
        ("2k米和3w元", "两千米和三万元"),
        ("2.50元", "二点五零元"),
        # fractions and sums with spaces, money in front
        ("3/4", "四分之三"),
        ("3 / 4", "四分之三"),
        ("1+2=3", "一加二等于三"),
        ("1 + 2", "一加二"),
        ("3>=2", "三大于等于二"),
        ("$5", "五美元"),
        ("€ 3.5", "三点五欧元"),
        ("约3%", "约百分之三"),
        ("±3个", "正负三个"),
        # digit by digit
        ("V2.1", "V二点一"),
        ("192.168.0.1", "一九二点一六八点零点一"),
        ("021-12345678", "零二一一二三四五六七八"),
        ("119", "幺幺九"),
        ("尾号是1234", "尾号是幺二三四"),
        # groups of thousands
        ("1,234个", "一千两百三十四个"),
        ("1234,567个", "一百二十三万四千五百六十七个"),
        ("120000个", "十两万个"),
        ("100000000个", "一亿个"),
        ("120340056个", "一亿两千零三十四万零五十六个"),
        ("B2B、O2O和P2P", "B to B、O to O和P to P"),
        ("05个", "零五个"),
        ("中国 3-2 日本", "中国三比二日本"),
        ("中国3/2，美国10:9", "中国三比二，美国十比九"),
        ("中国3+2", "中国三加二"),
        ("12345678901", "幺二三四五六七八九零幺"),
        ("12345678901个", "一百二十三亿四千五百六十七万八千九百零一个"),
        ("123456789012个", "一千两百三十四亿五千六百七十八万九千零一十二个"),
        ("-5%", "百分之负五"),
        ("人均约5个", "人均约五个"),
        ("24:00，9:05", "二十四点，九点零五分"),
        ("9:05:00，9:05:30", "九点零五分，九点零五分三十秒"),
        ("9:5", "九比五"),
        ("31/12/2024", "二零二四年十二月三十一日"),
        ("5月-6月，5~6月", "五月到六月，五到六月"),
        ("2两，12两", "二两，十二两"),
        ("CAD$2", "二加元"),
        ("-1/2", "二分之负一"),
        ("1.5/2", "二分之一点五"),
        ("v1.0和V1.2.3", "v一点零和V一点二点三"),
        ("尾号1234", "尾号幺二三四"),
        ("１２，ＡＢ", "十二，AB"),
        ("00后和80后", "零零后和八零后"),
    ],
)
def test_the_second_stage_alone(text: str, spoken: str) -> None:
    assert verbalize_remaining_numbers(text) == spoken


@pytest.mark.parametrize(
    ("text", "spoken"),
    [
        ("5月31日", "五月三十一日"),
        ("5月31日和6月1号", "五月三十一日和六月一号"),
        ("2024-12-31", "二零二四年十二月三十一号"),
        ("2024-12-32", "两千零二十四减十二减三十二"),
        ("2024-13-01", "两千零二十四减十三减一"),
        ("2024-1-0", "两千零二十四减一减零"),
        ("20245年", "二万两百四十五年"),
        ("1:2:3", "一点零二分零三秒"),
        ("12:345", "12:345"),
        ("10:00am到", "上午十点整到"),
        ("v1.2.3", "v一点二点三"),
        ("1.2.3.4", "幺点二点三点四"),
        ("3-5/8", "三至八分之五"),
        ("010-1234-5678", "零幺零幺二三四五六七八"),
        ("401-123-4567", "四百零一减一百二十三减四千五百六十七"),
        ("12-34", "12-34"),
        ("400-800+1234", "四百减八百加一千两百三十四"),
        ("8:00:00-9:30营业", "八点整至九点三十分营业"),
        ("2024-5-1~2024-5-3放假", "二零二四年五月一号至二零二四年五月三号放假"),
        ("1.5-2.5米", "一点五至二点五米"),
        ("①⑳㉑㉟㊱㊿⓵⓾⓪❶❿⓫⓴Ⅰ", "一二十二十一三十五三十六五十一十零一十十一二十一"),
        ("JP¥5和5￥", "五日元和五元"),
        ("ID是12，电话123", "ID是幺二，电话幺二三"),
        ("FM101和12APP", "FM幺零幺和幺二APP"),
        ("iOS 17和Android14", "iOS十七和Android十四"),
        ("等于5，门票为99", "等于五，门票为九十九"),
        ("5#楼", "五号楼"),
        ("5元-8元", "五元至八元"),
        ("3-5元", "三至五元"),
        ("-5元或~5元", "负五元或大约五元"),
        ("1. a", "一. a"),
        ("1.a", "1.a"),
        ("12. a", "12. a"),
        ("序列号A1-2", "序列号A幺杠二"),
        ("3kg、3kgs", "三千克、3kgs"),
        ("沪深3000", "沪深3000"),
        ("纳斯达克100和标普500", "纳斯达克一百和标普五百"),
        ("2024-012-05", "两千零二十四减十二减五"),
        ("2024-5-012", "两千零二十四减五减十二"),
        ("A1B2C3，A1B2C", "A幺B二C三，A1B2C"),
        ("A-1-B-，AB-12-C", "A杠幺杠B杠，AB-12-C"),
        ("2.13.3", "二点十三点三"),
        ("10:30a m", "上午十点三十分"),
        ("012-12345678", "零幺二幺二三四五六七八"),
        ("0123-12345678", "零幺二三幺二三四五六七八"),
        ("012-345-6789", "零幺二三四五六七八九"),
        ("0123-4567-8901", "零幺二三四五六七八九零幺"),
        ("12-3456-7890", "十二减三千四百五十六减七千八百九十"),
        ("iOS 5.1，价格是1.5", "iOS五点一，价格是一点五"),
        ("8月15", "八月15"),
    ],
)
def test_the_first_stage_alone(text: str, spoken: str) -> None:
    assert verbalize_numbers(text) == spoken


def test_a_list_may_begin_with_its_number() -> None:
    """The mark behind it is a dot alone, and a space follows."""
    assert verbalize_numbers("1. 苹果\n2. 梨") == "一. 苹果\n二. 梨"
    assert verbalize_numbers("1.. 苹果") == "1.. 苹果"


def test_digits_of_other_scripts_have_no_reading() -> None:
    with pytest.raises(UnreadableNumberError):
        read_telephone("٣")
    assert normalize_text("有٣个") == "有٣个"


def test_clean_up_order() -> None:
    assert clean_up("a\n`x`**b**😀 ★c") == "abc"
    assert clean_up("a\U0001f600b\U0001f64fc") == "abc", "the whole block of emoticons"
    assert clean_up("1,234 5") == "12345"
    assert clean_up("ab   cd . ef") == "ab cd . ef"
