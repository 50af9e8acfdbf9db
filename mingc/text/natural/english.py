"""Reads the numbers, abbreviations and symbols of an English clause.

The rules are applied in order. The first ones rewrite notations with several numbers (dates, times, ranges); digits
that they leave are read by later ones, so a range of prices is a range and then a price.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from mingc.text.english_numerals import NumberTooLargeError, cardinal_words, ordinal_words

_Match = re.Match[str]
_DIGITS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
_MONTHS = (
    "January", "February", "March", "April", "May", "June", "July", "August", "September", "October", "November",
    "December",
)  # fmt: skip
_DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
_MONTH_OF = {name[:size].lower(): name for name in _MONTHS for size in (3, len(name))} | {"sept": "September"}
_DAY_OF = {name[:size].lower(): name for name in _DAYS for size in (3, len(name))} | {
    "tues": "Tuesday", "weds": "Wednesday", "thur": "Thursday", "thurs": "Thursday"
}  # fmt: skip
# Of ASCII letters: without regard to case, "ı" and "ſ" are "i" and "s" too.
_MONTH = rf"(?P<month>(?a:{'|'.join(sorted(_MONTH_OF, key=len, reverse=True))}))\b\.?"
_NUMBER = r"\d{1,3}(?:,\d{3})+(?:\.\d+)?|\d+(?:\.\d+)?|\.\d+"
_SCALE = {"k": "thousand", "m": "million", "mn": "million", "mm": "million", "b": "billion", "bn": "billion",
          "t": "trillion", "tn": "trillion"}  # fmt: skip
_SCALES = r"(?:thousand|million|billion|trillion)"

# Singular and plural; a unit alone in its plural is regular.
_UNITS: dict[str, str] = {
    "mm": "millimeter", "cm": "centimeter", "m": "meter", "km": "kilometer", "μm": "micrometer", "µm": "micrometer",
    "um": "micrometer", "nm": "nanometer", "mi": "mile", "mile": "mile", "yd": "yard", "yds": "yard",
    "in": "inch", "ft": "foot",
    "mg": "milligram", "μg": "microgram", "µg": "microgram", "mcg": "microgram", "g": "gram", "kg": "kilogram",
    "kgs": "kilogram",
    "lb": "pound", "lbs": "pound", "oz": "ounce", "ml": "milliliter", "mL": "milliliter", "cl": "centiliter",
    "dl": "deciliter", "l": "liter", "L": "liter", "gal": "gallon", "qt": "quart", "pt": "pint", "tsp": "teaspoon",
    "tbsp": "tablespoon", "ns": "nanosecond", "μs": "microsecond", "µs": "microsecond", "ms": "millisecond",
    "s": "second",
    "sec": "second", "secs": "second", "min": "minute", "mins": "minute", "h": "hour", "hr": "hour",
    "hrs": "hour", "yr": "year",
    "yrs": "year", "wk": "week", "wks": "week", "mo": "month", "mos": "month", "Hz": "hertz", "kHz": "kilohertz",
    "KHz": "kilohertz", "MHz": "megahertz", "GHz": "gigahertz", "bit": "bit", "kB": "kilobyte", "KB": "kilobyte",
    "MB": "megabyte", "GB": "gigabyte", "TB": "terabyte", "PB": "petabyte", "KiB": "kibibyte", "MiB": "mebibyte",
    "GiB": "gibibyte", "TiB": "tebibyte", "kb": "kilobit", "Kb": "kilobit", "Mb": "megabit", "Gb": "gigabit",
    "kbps": "kilobit per second",
    "Kbps": "kilobit per second", "Mbps": "megabit per second", "Gbps": "gigabit per second",
    "bps": "bit per second",
    "W": "watt", "mW": "milliwatt", "kW": "kilowatt", "MW": "megawatt", "GW": "gigawatt", "Wh": "watt hour",
    "kWh": "kilowatt hour",
    "MWh": "megawatt hour", "V": "volt", "mV": "millivolt", "kV": "kilovolt", "mA": "milliampere",
    "mAh": "milliampere hour", "Ah": "ampere hour", "Ω": "ohm", "\u2126": "ohm", "kΩ": "kilohm",
    "kJ": "kilojoule", "cal": "calorie",
    "kcal": "kilocalorie", "Pa": "pascal", "hPa": "hectopascal", "kPa": "kilopascal", "psi": "p s i",
    "bar": "bar", "dB": "decibel", "px": "pixel", "dpi": "dots per inch", "ppi": "pixels per inch",
    "fps": "frames per second",
    "rpm": "revolutions per minute", "bpm": "beats per minute", "mph": "mile per hour", "kph": "kilometer per hour",
    "kmh": "kilometer per hour", "mpg": "mile per gallon", "ppm": "parts per million", "ha": "hectare",
    "sqft": "square foot",
    "sq ft": "square foot", "sq. ft.": "square foot", "sqm": "square meter", "hp": "horsepower", "pts": "point",
    "pcs": "piece", "°C": "degree Celsius", "°F": "degree Fahrenheit",
    "° C": "degree Celsius", "° F": "degree Fahrenheit", "°K": "kelvin", "°": "degree", "ºC": "degree Celsius",
    "ºF": "degree Fahrenheit", "º": "degree",
    "%": "percent", "‰": "per mille", "lx": "lux", "lm": "lumen", "mol": "mole", "eV": "electron volt",
}  # fmt: skip
_PER = {"h": "hour", "hr": "hour", "s": "second", "sec": "second", "min": "minute", "day": "day", "d": "day",
 "week": "week", "month": "month", "mo": "month",
        "year": "year", "yr": "year", "kg": "kilogram", "g": "gram", "l": "liter", "L": "liter", "m": "meter",
        "km": "kilometer", "ml": "milliliter", "mL": "milliliter", "dL": "deciliter",
        "lb": "pound", "gal": "gallon", "m²": "square meter", "hour": "hour", "person": "person",
        "cm": "centimeter", "mol": "mole", "night": "night", "minute": "minute", "second": "second"}  # fmt: skip
_INVARIANT = {"hertz", "percent", "per mille", "p s i", "horsepower", "kelvin", "lux", "dots", "pixels", "frames",
              "revolutions", "beats", "parts", "bar"}  # fmt: skip
_CURRENCIES = {
    "US$": ("dollar", "cent"), "$": ("dollar", "cent"), "C$": ("Canadian dollar", "cent"),
    "CA$": ("Canadian dollar", "cent"),
    "A$": ("Australian dollar", "cent"), "AU$": ("Australian dollar", "cent"), "HK$": ("Hong Kong dollar", "cent"),
    "NZ$": ("New Zealand dollar", "cent"), "S$": ("Singapore dollar", "cent"), "R$": ("real", "centavo"),
    "€": ("euro", "cent"), "£": ("pound", "penny"), "¥": ("yen", ""), "￥": ("yen", ""), "₹": ("rupee", "paisa"),
    "₩": ("won", ""), "₽": ("ruble", "kopeck"), "₿": ("bitcoin", ""), "₺": ("lira", ""), "₫": ("dong", ""),
    "฿": ("baht", ""), "₪": ("shekel", ""), "₴": ("hryvnia", ""),
    "USD": ("US dollar", "cent"), "EUR": ("euro", "cent"), "GBP": ("pound", "penny"), "JPY": ("yen", ""),
    "CNY": ("yuan", ""), "RMB": ("yuan", ""), "CHF": ("Swiss franc", "rappen"), "INR": ("rupee", "paisa"),
    "CAD": ("Canadian dollar", "cent"), "AUD": ("Australian dollar", "cent"), "KRW": ("won", ""),
    "SEK": ("krona", ""), "HKD": ("Hong Kong dollar", "cent"),
}  # fmt: skip
_PLURALS = {"penny": "pence", "foot": "feet", "inch": "inches", "yen": "yen", "yuan": "yuan", "won": "won",
 "dong": "dong",
            "baht": "baht", "rappen": "rappen", "paisa": "paise", "krona": "kronor", "century": "centuries",
            "lux": "lux", "hertz": "hertz"}  # fmt: skip
_SIGNS = "|".join(
    re.escape(each) for each in sorted(_CURRENCIES, key=len, reverse=True) if not each.isalpha()
)
_CODES = "|".join(each for each in _CURRENCIES if each.isalpha())

_ABBREVIATIONS: tuple[tuple[str, str], ...] = (  # a pattern without its dot; matched with one
    (r"Mr", "Mister"), (r"Mrs", "Missus"), (r"Ms", "Miz"), (r"Drs", "Doctors"), (r"Prof", "Professor"),
    (r"Gen(?=\.\s+[A-Z])", "General"), (r"Col(?=\.\s+[A-Z])", "Colonel"), (r"Capt", "Captain"), (r"Lt",
     "Lieutenant"),
    (r"Sgt", "Sergeant"), (r"Rev(?=\.\s+[A-Z])", "Reverend"), (r"Hon(?=\.\s+[A-Z])", "Honorable"), (r"Gov",
     "Governor"),
    (r"Sen(?=\.\s+[A-Z])", "Senator"), (r"Rep(?=\.\s+[A-Z])", "Representative"), (r"Pres(?=\.\s+[A-Z])",
     "President"),
    (r"Jr", "Junior"), (r"Sr", "Senior"), (r"Inc", "Incorporated"), (r"Ltd", "Limited"), (r"Corp", "Corporation"),
    (r"Co", "Company"), (r"Bros", "Brothers"), (r"Ave", "Avenue"), (r"Blvd", "Boulevard"), (r"Rd", "Road"),
     (r"Ln", "Lane"),
    (r"Hwy", "Highway"), (r"Pkwy", "Parkway"), (r"Sq", "Square"), (r"Apt", "Apartment"), (r"Mt(?=\.\s+[A-Z])",
     "Mount"), (r"Ft(?=\.\s+[A-Z])", "Fort"),
    (r"[Vv]s?(?=\.\s)", "versus"), (r"[Ee]tc", "et cetera"), (r"[Ee]\.g", "for example"), (r"[Ii]\.e",
     "that is"), (r"[Cc]f", "compare"), (r"ca?(?=\.\s*\d{3,4})", "circa"),
    (r"[Aa]pprox", "approximately"), (r"[Dd]ept", "department"), (r"[Ee]st(?=\.\s+\d)", "established"),
     (r"[Mm]ax", "maximum"),
    (r"[Mm]in(?=\.\s+[a-z\d])", "minimum"), (r"[Tt]el", "telephone"), (r"[Ee]xt", "extension"),
     (r"[Ff]igs?(?=\.\s*\d)", "figure"),
    (r"[Ee]q(?=\.\s*\d)", "equation"), (r"[Vv]ol(?=\.\s*\w)", "volume"), (r"[Cc]h(?=\.\s*\d)", "chapter"),
     (r"[Ss]ec(?=\.\s*\d)", "section"),
    (r"pp(?=\.\s*\d)", "pages"), (r"p(?=\.\s*\d)", "page"), (r"[Ee]t al", "et al"), (r"[Mm]isc",
     "miscellaneous"), (r"[Gg]ov?t", "government"), (r"[Aa]ssn", "association"),
    (r"[Ii]ncl", "including"), (r"[Nn][Oo](?=\.\s*\d)", "number"), (r"[Nn]os(?=\.\s*\d)", "numbers"), (r"[Aa]ppt",
     "appointment"),
)  # fmt: skip
# Most words have no dot behind them, and need not be compared with every abbreviation.
_ABBREVIATION = re.compile(
    r"(?<![\w.])(?=[A-Za-z ]{1,6}\.)(?:" + "|".join(f"({pattern})" for pattern, _ in _ABBREVIATIONS) + r")\."
)
_ROMAN_BEFORE = (
    "chapter|part|volume|book|act|scene|section|world war|war|phase|stage|type|class|level|appendix|article|title|"
    "super bowl|episode|figure|table|step|tier|mark|final fantasy|rocky|division|group|unit|season|vatican|schedule"
)
_ROMAN_NAMES = (
    "Henry|Louis|Elizabeth|George|Edward|Richard|William|James|Charles|John Paul|Benedict|Pius|Napoleon|Philip|Peter|"
    "Catherine|Frederick|Ferdinand|Alexander|Nicholas|Ramses|Ramesses|Ivan|Gregory|Leo|Innocent|Clement|Paul|Mary|Robert|Otto|Alfonso|"
    "Gustav|Christian|Leopold|Francis|Joseph|Albert|Rama|Urban|Constantine|Cleopatra|Darius|Xer"
    "xes|Ptolemy|David|Haakon|Harald|Olav|Carl|Margaret|Margrethe|Victor Emmanuel|Thutm"
    "ose|Amenhotep|Julius|Sixtus|Boniface|Wilhelm|Pope \\w+|King \\w+|Queen \\w+|Emperor \\w+"
)
_ROMAN = r"(?=[IVXLC])(?:XC|XL|L?X{0,3})(?:IX|IV|V?I{0,3})"
_CODE_WORDS = (
    r"(?:room|suite|flight|zip(?: code)?|code|pin|postcode|gate|extension|ext|id|password|passcode|apartment|apt"
    r"|unit|"
    r"badge|locker|account|invoice|order|ticket|case|tracking|serial|reference|confirmation|card|model|license"
    r"|booking|reservation)"
)
_CODE_LINK = r"(?:\s+(?:number|code|no|ending in|is|was|ends in|ending|nr))*(?:\s*[:#]\s*|\s+#?)"
_YEAR_WORDS = (
    r"in|since|by|until|till|from|circa|of|year|years|around|before|after|during|between|through|late|early|mid|"
    r"to|and|summer|winter|spring|fall|autumn|class of|copyright|©|established|" + "|".join(_MONTHS)
)
_FRACTION_NAMES = {"½": "1/2", "⅓": "1/3", "⅔": "2/3", "¼": "1/4", "¾": "3/4", "⅕": "1/5", "⅖": "2/5",
 "⅗": "3/5", "⅘": "4/5",
                   "⅙": "1/6", "⅚": "5/6", "⅐": "1/7", "⅛": "1/8", "⅜": "3/8", "⅝": "5/8", "⅞": "7/8",
                   "⅑": "1/9", "⅒": "1/10"}  # fmt: skip
_ADDRESS_SIGNS = {
    ".": "dot", "/": "slash", "@": "at", "-": "dash", "_": "underscore", ":": "colon", "~": "tilde", "+": "plus"
}  # fmt: skip
_FRACTION_WORDS = {2: "half", 4: "quarter"}
_SYMBOLS = {
    "&": "and", "%": "percent", "+": "plus", "=": "equals", "<": "is less than", ">": "is greater than",
    "×": "times", "÷": "divided by",
    "≈": "approximately", "≠": "is not equal to", "≤": "is less than or equal to",
    "≥": "is greater than or equal to",
    "±": "plus or minus", "°": "degrees", "√": "square root of", "∞": "infinity", "π": "pi", "→": "to",
    "←": "from", "⇒": "implies",
    "$": "dollars", "€": "euros", "£": "pounds", "¥": "yen", "¢": "cents", "§": "section", "¶": "paragraph",
    "©": "copyright",
    "®": "", "™": "", "@": "at", "#": "number", "*": "times", "^": "to the power of", "|": ",", "~": "about",
    "\\": "backslash", "∑": "sum of",
    "∫": "integral of", "∂": "partial", "∈": "in", "∪": "union", "∩": "intersection", "∀": "for all",
    "∃": "there exists",
    "µ": "micro", "‰": "per mille", "№": "number", "…": "...", "—": ", ", "–": ", ", "−": "minus", "•": ",",
    "·": ",",
}  # fmt: skip


def cardinal(digits: str) -> str:
    """Words of an integer; digit by digit where no name exists or it begins with a zero."""
    digits = digits.replace(",", "")
    if len(digits) > 1 and digits[0] == "0":
        return spell(digits)
    try:
        return cardinal_words(int(digits)).replace(",", "")
    except NumberTooLargeError:
        return spell(digits)


def ordinal(value: int) -> str:
    return ordinal_words(value).replace(" and ", " ").replace(",", "")


def spell(text: str) -> str:
    """Every digit, and every letter as it is."""
    return " ".join(_DIGITS[int(each)] if each.isdecimal() else each for each in text if each.isalnum())


def number(text: str) -> str:
    """Words of `1,234.50`: the whole part as a cardinal, then each digit of the fraction."""
    whole, _, fraction = text.partition(".")
    words = cardinal(whole or "0")
    return f"{words} point {spell(fraction)}" if fraction else words


def year(digits: str) -> str:
    """1905 → nineteen oh five, 2005 → two thousand five, 2024 → twenty twenty-four."""
    value = int(digits)
    century, rest = divmod(value, 100)
    if value < 1000 or value >= 10000 or (century % 10 == 0 and rest < 10):
        return cardinal(str(value))
    if rest == 0:
        return f"{cardinal(str(century))} hundred"
    return f"{cardinal(str(century))} {'oh ' if rest < 10 else ''}{cardinal(str(rest))}"


def plural(noun: str) -> str:
    """The plural of a unit or currency; `per` and what follows it stay."""
    first, per, rest = noun.partition(" per ")
    if first.endswith("hertz"):
        return noun
    if first.split()[0] in _INVARIANT or first in _INVARIANT:
        return noun
    if first.startswith("degree"):
        return noun.replace("degree", "degrees", 1)
    head, _, last = first.rpartition(" ")
    last = _PLURALS.get(last) or (last if last.endswith("s") else last + "s")
    return f"{head} {last}".strip() + per + rest


def _counted(amount: str, noun: str) -> str:
    return f"{number(amount)} {noun if amount == '1' else plural(noun)}"


# Dates.


def _valid_date(month: int, day: int) -> bool:
    return 1 <= month <= 12 and 1 <= day <= 31


def _date(year_digits: str, month: int, day: int) -> str:
    return f"{_MONTHS[month - 1]} {ordinal(day)}, {year(year_digits)}"


def _iso_date(match: _Match) -> str:
    month, day = int(match["m"]), int(match["d"])
    return (
        _date(match["y"], month, day) + (" at " if match["t"] else "")
        if _valid_date(month, day)
        else match[0]
    )


def _short_date(match: _Match) -> str:
    first, second, year_digits = int(match[1]), int(match[3]), match[4]
    if len(year_digits) == 2:
        year_digits = ("20" if int(year_digits) < 70 else "19") + year_digits
    is_american = match[2] == "/" or match[2] == "-"
    for month, day in (
        ((first, second), (second, first)) if is_american else ((second, first), (first, second))
    ):
        if _valid_date(month, day):
            return _date(year_digits, month, day)
    return match[0]


def _month_day(match: _Match) -> str:
    """`March 3rd, 2025`, `Jan. 5-7`."""
    month, day, last, year_digits = (
        _MONTH_OF[match["month"].lower()], match["day"], match["last"], match["year"]
    )  # fmt: skip
    if not 1 <= int(day) <= 31:
        return match[0]
    words = f"{month} {ordinal(int(day))}"
    if last:
        words += f" to {ordinal(int(last))}"
    return words + (f", {year(year_digits)}" if year_digits else "")


def _day_month(match: _Match) -> str:
    """`3 March 2025`, `the 3rd of March`."""
    day, last, year_digits = match["day"], match["last"], match["year"]
    if not 1 <= int(day) <= 31:
        return match[0]
    article = "" if match["the"] else "the "
    words = f"{match['the'] or ''}{article}{ordinal(int(day))}"
    if last:
        words += f" to the {ordinal(int(last))}"
    words += f" of {_MONTH_OF[match['month'].lower()]}"
    return words + (f" {year(year_digits)}" if year_digits else "")


def _month_year(match: _Match) -> str:
    return f"{_MONTH_OF[match['month'].lower()]} {year(match['year'])}"


def _name_range(match: _Match) -> str:
    first, last = (_DAY_OF.get(each.lower()) or _MONTH_OF.get(each.lower()) for each in (match[1], match[2]))
    return f"{first} to {last}" if first and last else match[0]


def _day_name(match: _Match) -> str:
    name = _DAY_OF.get(match[1].lower()) or _MONTH_OF.get(match[1].lower())
    return name or match[0]


# Times, numbers of telephones and machines.


def _half_day(letter: str) -> str:
    return f"{letter.lower()} m"


def _time(match: _Match) -> str:
    hour, minute, second, half = match["h"], match["min"], match["s"], match["half"]
    if int(hour) > 24 or int(minute) > 59:
        return match[0]
    if minute == "00" and not second:
        words = cardinal(str(int(hour)))
        if int(hour) > 12 and not half:
            words += " hundred"
        elif hour == "00" or int(hour) == 0:
            words = "zero hundred"
        elif not half and not match["oclock"]:
            words += " o'clock"
    else:
        words = cardinal(str(int(hour))) + (" oh " if minute[0] == "0" else " ") + cardinal(str(int(minute)))
    if second:
        words += (" oh " if second[0] == "0" else " ") + cardinal(str(int(second)))
    return words + (f" {_half_day(half)}" if half else "")


def _score_or_range(match: _Match) -> str:
    """`3-2` is a score behind a word for it, otherwise `10-20` is a range."""
    first, second = match["a"], match["b"]
    if match["sign"] and not match["sign2"]:
        return f"{first} to {match['sign']}{second}"
    return f"{match['sign'] or ''}{first} to {match['sign2'] or ''}{second}"


def _score(match: _Match) -> str:
    first, second = match["a"], match["b"]
    joint = " to " if max(int(first), int(second)) > 20 else " "
    return f"{match['word']}{cardinal(first)}{joint}{cardinal(second)}"


def _ratio(match: _Match) -> str:
    joint = "by" if {match[1], match[2]} & {"16", "21"} and match[2] in ("9", "10") else "to"
    return f" {number(match[1])} {joint} {number(match[2])}" + (
        f" {joint} {number(match[3])}" if match[3] else ""
    )


def _phone(match: _Match) -> str:
    groups = re.findall(r"\d+", match[0])
    return ("plus " if match[0].startswith("+") else "") + ", ".join(
        "eight hundred" if group == "800" else spell(group) for group in groups
    )


def _address(match: _Match) -> str:
    return " dot ".join(cardinal(part) if len(part) < 3 else spell(part) for part in match[0].split("."))


def _version(match: _Match) -> str:
    parts = " point ".join(cardinal(part) for part in match[2].split("."))
    return f"{'version ' if match[1] else ''}{parts}"


# Money, units, fractions.

_ARTICLE = re.compile(
    r"\b(?:a|an|the|this|that|another|each|every|my|your|our|his|her|their|its|one)\s+$", re.IGNORECASE
)
_NOUN_AFTER = re.compile(
    r"\s(?!(?:of|is|are|was|were|in|on|at|per|from|to|for|and|or|a|an|each|more|less|off|with|by|you|we|he|she"
    r"|they|it|that|"
    r"long|high|tall|wide|deep|away|ago|old|thick|later|before|after|if|has|have|had|will|would|can|goes"
    r"|went)\b)[a-z]+"
)


def _is_adjective(match: _Match) -> bool:
    """Whether a measure is in front of its noun: a 5 kg bag."""
    return bool(
        _ARTICLE.search(match.string, 0, match.start()) and _NOUN_AFTER.match(match.string, match.end())
    )


def _money(amount: str, scale: str, names: tuple[str, str], *, is_adjective: bool) -> str:
    unit, cent = names
    scale = _SCALE.get(scale.lower(), scale.lower()) if scale else ""
    whole, _, fraction = amount.partition(".")
    if scale:
        return f"{number(amount)} {scale} {unit if is_adjective else plural(unit)}"
    if len(fraction) == 2 and cent and int(whole.replace(",", "") or "0") + int(fraction):
        coins = f"{cardinal(str(int(fraction)))} {cent if int(fraction) == 1 else plural(cent)}"
        if not int(whole.replace(",", "") or "0"):
            return coins
        notes = _counted(whole, unit)
        return notes if not int(fraction) else f"{notes} and {coins}"
    if is_adjective:
        return f"{number(amount)} {unit}"
    return _counted(amount, unit)


def _gap(match: _Match) -> str:
    """A blank behind a letter, as in us$5."""
    return " " if match.string[max(0, match.start() - 1) : match.start()].isalpha() else ""


def _money_before(match: _Match) -> str:
    is_adjective = match["noun"] is not None or bool(match["hyphen"]) or _is_adjective(match)
    words = _money(match["n"], match["scale"] or "", _CURRENCIES[match["sign"]], is_adjective=is_adjective)
    return f"{_gap(match)}{'minus ' if match['minus'] else ''}{words}{' ' if match['hyphen'] else ''}"


def _money_after(match: _Match) -> str:
    return _money(match["n"], match["scale"] or "", _CURRENCIES[match["sign"]], is_adjective=False)


def _with_unit(match: _Match) -> str:
    amount, unit, per, power = match["n"], match["unit"], match["per"], match["power"]
    if match["gap"] and unit in ("in", "s", "h"):
        return match[0]  # 5 in 10, 3 s
    noun = _UNITS[unit]
    if power:
        noun = f"{'square' if power.strip('^ ') == '2' else 'cubic'} {noun}"
    if per:
        noun += f" per {_PER[per]}"
    if match["hyphen"] or (match["minus"] is None and _is_adjective(match)):
        return f"{number(amount)} {noun}"
    minus = "minus " if match["minus"] else ""
    return f"{minus}{_counted(amount, noun)}"


def _fraction(match: _Match) -> str:
    whole, above, below, unit = match["w"], int(match["a"]), int(match["b"]), match["unit"]
    if below == 0 or below > 100 or (not whole and (above >= below or (below in (10, 100) and above > 1))):
        joint = "over" if above > below else "" if above == below and above >= 20 else "out of"
        return (
            f"{match['w'] or ''} {cardinal(match['a'])} {joint} {cardinal(match['b'])} {unit or ''}".strip()
        )
    if above == 1:
        words = f"{'a' if whole and below == 2 else 'one'} {_FRACTION_WORDS.get(below) or ordinal(below)}"
    else:
        name = "halve" if below == 2 else _FRACTION_WORDS.get(below) or ordinal(below)
        words = f"{cardinal(match['a'])} {name}s"
    noun = "" if unit is None else " " + (plural(_UNITS[unit]) if whole else _UNITS[unit])
    return (f"{cardinal(whole)} and {words}" if whole else words) + noun


def _feet(match: _Match) -> str:
    inches = f" {cardinal(match[2])}" if match[2] else ""
    return f"{cardinal(match[1])} {'foot' if inches else 'feet'}{inches}"


def _decade(match: _Match) -> str:
    digits = match[1]
    if len(digits) == 2:
        return plural_number(cardinal(digits))
    century, rest = digits[:2], digits[2:]
    if rest == "00":
        return f"{cardinal(century)} hundreds" if century != "20" else "two thousands"
    return f"{cardinal(century)} {plural_number(cardinal(rest))}"


def plural_number(words: str) -> str:
    return words[:-1] + "ies" if words.endswith("y") else words + ("es" if words.endswith("x") else "s")


def _roman_value(text: str) -> int:
    values = [{"I": 1, "V": 5, "X": 10, "L": 50, "C": 100}[each] for each in text]
    return sum(-a if a < b else a for a, b in zip(values, [*values[1:], 0], strict=True))


def _code(match: _Match) -> str:
    text = match["code"]
    if len(text) < 3 or "," in text:
        return match[0]
    words = _pairs(text) if re.fullmatch(r"[1-9]0[1-9]", text) else spell(text)
    return match["word"].replace("#", "number ") + words


def _year_like(match: _Match) -> str:
    return f"{match[1]}{year(match[2])}"


def _letters_number(match: _Match) -> str:
    """`GPT-4`, `A380`, `UA123`, `COVID-19`."""
    letters, digits, after = match[1], match[3], match[4]
    if len(digits) > 4 or (digits[0] == "0" and len(digits) > 1) or (len(digits) == 3 and not match[2]):
        words = spell(digits)
    elif len(digits) == 4:
        words = year(digits)
    elif len(digits) == 3:
        words = _pairs(digits)
    else:
        words = cardinal(digits)
    return f"{letters} {words}{' ' + after if after else ''}"


def _pairs(digits: str) -> str:
    """747 → seven forty-seven, 1080 → ten eighty, 101 → one oh one."""
    head, last = digits[:-2], digits[-2:]
    rest = "hundred" if last == "00" else f"oh {cardinal(last[1])}" if last[0] == "0" else cardinal(last)
    return f"{cardinal(head)} {rest}"


def _power(match: _Match) -> str:
    exponent = match[1].strip("{} ")
    known = {"2": " squared", "3": " cubed"}.get(exponent)
    if known:
        return known + " "
    sign = "minus " if exponent.startswith("-") else ""
    return f" to the power of {sign}{number(exponent.lstrip('-+')) if exponent.lstrip('-+').isdigit() else exponent} "


def _plain(match: _Match) -> str:
    return _gap(match) + number(match[0])


def _host(match: _Match) -> str:
    """Name a link by its host and path, without its scheme and query."""
    text = re.sub(r"^[a-z]+://", "", match[0], flags=re.IGNORECASE)
    text = re.split(r"[?#]", text)[0].rstrip("/")
    text = text.removeprefix("www.") if text.count(".") > 1 else text
    return _named(text)


def _named(text: str) -> str:
    for sign, word in _ADDRESS_SIGNS.items():
        text = text.replace(sign, f" {word} ")
    return re.sub(
        r"\d+", lambda found: f" {cardinal(found[0]) if len(found[0]) < 3 else spell(found[0])} ", text
    )


def _rules() -> tuple[tuple[re.Pattern[str], str | Callable[[_Match], str]], ...]:
    units = "|".join(re.escape(each) for each in sorted(_UNITS, key=len, reverse=True))
    per = "|".join(re.escape(each) for each in sorted(_PER, key=len, reverse=True))
    scale = rf"(?:\s*(?P<scale>{_SCALES}|(?-i:[kKMBT]|bn|mn|tn|m|b)(?![A-Za-z])))?"
    fractions = "".join(_FRACTION_NAMES)
    any_case = re.IGNORECASE
    return (
        (re.compile(rf"(?:(\d)\s?)?([{fractions}])"),
         lambda m: f"{m[1] + ' ' if m[1] else ''}{_FRACTION_NAMES[m[2]]}"),
        # durations and ratios
        (re.compile(r"(?<![\w.])(\d+)\s?h(?:rs?)?\s?(\d{1,2})\s?m(?:ins?)?\b(?:\s?(\d{1,2})\s?s(?:ecs?)?\b)?"),
         lambda m: " ".join(_counted(m[place], unit) for place, unit in ((1, "hour"), (2, "minute"), (3, "second"))
         if m[place])),
        (re.compile(r"(\b(?:dilut\w*|mix\w*|ratio|scale|odds|proportions?|blend\w*)\b[^\d.;!?]{0,40}?)(?<!\bat )"
            r"(\d+):(\d+)(?![\d:])", any_case),
         lambda m: f"{m[1]}{cardinal(m[2])} to {cardinal(m[3])}"),
        # dates
        (re.compile(r"(?<![\d./-])(?P<y>[12]\d{3})(?P<sep>[-/.])(?P<m>\d{1,2})(?P=sep)(?P<d>\d{1,2})(?![\d/-])(?:"
            r"(?P<t>T)(?=\d)|)"), _iso_date),
        (re.compile(r"(?<![\d./-])(\d{1,2})([-/.])(\d{1,2})\2(\d{4}|\d{2}(?=\D|$))(?![\d/-])(?!\.\d)"),
         _short_date),
        (re.compile(r"(?P<w>\b(?:on|until|by|since|before|after|from|dated|due|for|of) )(?P<m>1[0-2]|0?[1-9])/"
            r"(?P<d>3[01]|[12]\d|0?[1-9])(?![\d/%])(?=$|[\s,.;!?)])(?!\s+(?:of|cup|inch|mile|teaspoon|tablespoon"
            r"|pound|hour|the)s?\b)", any_case),
         lambda m: m[0] if (m["m"], m["d"]) in (("9", "11"), ("24", "7"), ("1", "2"), ("1", "3"), ("1", "4"),
          ("3", "4"), ("2", "3")) else f"{m['w']}{_MONTHS[int(m['m']) - 1]} {ordinal(int(m['d']))}"),
        (re.compile(rf"\b{_MONTH}\s+(?P<day>\d{{1,2}})(?:st|nd|rd|th)?(?:\s*[-–—]\s*(?P<last>\d{{1,2}})(?:st|nd"
            rf"|rd|th)?)?(?![\d:%])(?!\.\d)(?:,?\s+(?P<year>[12]\d{{3}})\b(?![-–/]))?", any_case), _month_day),
        (re.compile(rf"(?P<the>\bthe )?\b(?P<day>\d{{1,2}})(?:st|nd|rd|th)?(?:\s*[-–—]\s*(?P<last>\d{{1,2}})(?:st"
            rf"|nd|rd|th)?)?(?:\s+of)?\s+(?-i:(?=[A-Z])){_MONTH}(?:,?\s+(?P<year>[12]\d{{3}})\b)?", any_case),
         _day_month),
        (re.compile(rf"\b(?-i:(?=[A-Z])){_MONTH},?\s+(?P<year>[12]\d{{3}})\b", any_case), _month_year),
        (re.compile(r"\b([A-Z][a-z]{2,8})\.?\s*[-–—]\s*([A-Z][a-z]{2,8})\b\.?"), _name_range),
        (re.compile(r"\b(Mon|Tues?|Weds?|Thurs?|Fri|Sat|Sun|Jan|Feb|Mar|Apr|Jun|Jul|Aug|Sept?|Oct|Nov|Dec)\."
            r"(?=\s*(?:[\w,]|$))"), _day_name),
        (re.compile(r"(?<![\w./])((?:19|20)\d\d)/(\d\d)(?![\d/])"), lambda m: f"{year(m[1])} {cardinal(m[2])}"),
        # telephones, addresses of machines, versions
        (re.compile(r"(?<![\w.-])\d{1,3}(?:\.\d{1,3}){3}(?![\w.-]*\d)"), _address),
        (re.compile(r"(?<![\w-])(?:\+\d{1,3}[ .-]?|1[ .-])?\(\d{3}\)[ .-]?\d{3}[ .-]?\d{4}(?!\w)"), _phone),
        (re.compile(r"(?<![\w.$€£-])(?:\+\d{1,3}[ .-]|1-)?\d{3}[.-]\d{3,4}[.-]\d{4}(?![\w-])"), _phone),
        (re.compile(r"\+\d{1,3}(?:[ -]?\d{2,5}){2,5}(?![\w-])"), _phone),
        (re.compile(r"(?<![\w.$€£,-])\d{3}-\d{4}(?![\w-])"), _phone),
        (re.compile(r"(?<![\w-])\d{3}-\d{2}-\d{4}(?![\w-])"), _phone),
        (re.compile(r"(?<![\w.,-])(?:\d{4}(?: \d{4}){3}|0\d{2,4}(?: \d{3,4}){2})(?![\w-])"), _phone),
        (re.compile(r"\b(?<=call |dial |text |ring )(?P<n>\d{3}|\d{5,6})\b(?![,.]\d|\s+[a-z]+s\b)", any_case),
         lambda m: spell(m[0])),
        (re.compile(r"\b1-(800|8[3-8]\d)-(?=[A-Z])"),
         lambda m: f"one {cardinal(m[1]) if m[1] == '800' else spell(m[1])} "),
        (re.compile(r"\b(911|999|112|411|311)\b(?=\s+(?:call|operator|dispatch|emergency))"),
         lambda m: spell(m[0])),
        (re.compile(r"\b([vV])(?:er)?\.?\s?(\d+(?:\.\d+)*)(?![\w%])"), _version),
        (re.compile(r"(?<![\w.])()(\d+(?:\.\d+){2,})(?![\w.]*\d)"), _version),
        (re.compile(r"(?<=[a-z] )()(?<=version )(\d+\.\d+)\b(?!%)", any_case), _version),
        (re.compile(r"\b(?P<name>Python|Java|PHP|Ruby|Node|Django|CUDA|Ubuntu|iOS|Android|macOS|Windows|Rust|Go"
            r"|Debian|Kubernetes|PyTorch|TensorFlow|Swift|Kotlin|Perl|Postgres(?:QL)?|MySQL) (\d+\.\d+)\b(?!%)"),
         lambda m: f"{m['name']} {' point '.join(cardinal(p) for p in m[2].split('.'))}"),
        (re.compile(r"(\b(?:wait|waits|after|every|within|about|takes?|took|than|least) )(\d+)s\b"
            r"|()\b(\d0)s(?= (?:timeout|delay|interval|pause|wait|limit|cooldown)\b)", any_case),
         lambda m: f"{m[1] or ''}{_counted(m[2], 'second') if m[2] else cardinal(m[4]) + ' second'}"),
        (re.compile(r"(?<![\w.,])(?:['’](?=\d\ds))?([12]\d\d0|[2-9]0)['’]?s\b(?:[-–—](?=(?:[12]\d)?\d0s\b))?"),
         lambda m: _decade(m) + (" to " if m[0][-1] in "-–—" else "")),
        (re.compile(r"(?<=ISBN)(?P<is>[^\d\n]{0,6})(?P<n>\d[\d-]{8,15}\d)"), lambda m: m["is"] + spell(m["n"])),
        (re.compile(r"(?<=[Ff]light )(?P<is>(?:is |number |no )?[A-Z]{2}) ?(\d{2,4})\b"),
         lambda m: f"{m['is']} {spell(m[2])}"),
        (re.compile(r"(?<![\w.,$])(\d{4})(?= (?:[NSEW]\.? )?[A-Z][a-z]+ (?:Street|Avenue|Road|Boulevard|Lane"
            r"|Drive)\b)"),
         lambda m: _pairs(m[1])),
        # times
        (re.compile(r"(?<![\w])(\d{1,2}(?::\d\d)?)\s*[-–—]\s*(?=\d{1,2}(?::\d\d)?\s*[ap]\.?\s?m\b)", any_case),
         r"\1 to "),
        (re.compile(r"(?<=\d)\s*([ap])\.?\s?m\b\.?\s*[-–—]\s*(?=\d)", any_case), r" \1m to "),
        (re.compile(r"(?<=\d:\d\d)\s*[-–—~]\s*(?=\d{1,2}:\d\d)"), " to "),
        (re.compile(r"(?<![\d:.])(?P<h>\d{1,2}):(?P<min>\d\d)(?::(?P<s>\d\d)(?:\.\d+)?)?(?!\.\d)(?:Z\b)?(?:\s*"
            r"(?P<half>[ap])\.?\s?m\b(?:\.(?=\s|$|[,;)]))?)?(?P<oclock>\s+o'clock)?(?![\d:])(?!\s+(?:ratio|aspect"
            r"|odds|scale))", any_case),
         lambda m: _time(m) + (m["oclock"] or "")),
        (re.compile(r"(?<![\w.])(\d{1,2})\s*([ap])\.?\s?m\b(?:\.(?=\s|$|[,;)]))?", any_case),
         lambda m: f"{cardinal(m[1])} {_half_day(m[2])}"),
        (re.compile(r"\b(Psalms?|Genesis|Exodus|Matthew|Mark|Luke|John|Acts|Romans|Corinthians|Isaiah|Proverbs) "
            r"(\d+):(\d+)"),
         lambda m: f"{m[1]} {cardinal(m[2])} {cardinal(m[3])}"),
        (re.compile(r"(?<![\w.:])(\d{1,2}):([0-5]\d\.\d+)(?![\d:])"),
         lambda m: f"{cardinal(m[1])} {'oh ' if m[2][0] == '0' else ''}{number(m[2].removeprefix('0'))}"),
        (re.compile(r"(?<![\w.:])(\d+(?:\.\d+)?):(\d+(?:\.\d+)?)(?::(\d+))?(?![\d:])"), _ratio),
        # fixed expressions and scores
        (re.compile(r"\b24/7(?:/365)?\b"), lambda m: "twenty four seven" + (" three sixty five"
         if m[0].endswith("5") else "")),
        (re.compile(r"\b9/11\b"), "nine eleven"),
        (re.compile(r"\b(?P<word>(?:won|win|wins|lost|lose|loses|beat|beats|score|scored|lead|leads|led|leading"
            r"|trailed|trailing|victory|tied|ties|tie|drew|draw|defeat|defeated|ended|finished|final|ahead|up"
            r"|down|game|match|set)\b[^\d.;!?]{0,40}?)(?P<a>\d{1,3})\s?[-–—:]\s?(?P<b>\d{1,3})(?![\d%-])",
         any_case), _score),
        # ranges: the sign of the first number is the sign of both
        (re.compile(r"(?<![\w.:/-])(\d+)(?:[-–—]\d+){2,}(?![\w-])"), lambda m: ", ".join(cardinal(each)
         for each in re.findall(r"\d+", m[0]))),
        (re.compile(rf"(?<![\w.,-])(?P<n1>{_NUMBER})(?P<u>%|°|°[CF]|{units})\s*[-–—~]\s*(?P<n2>{_NUMBER})(?P=u)"
            rf"(?![A-Za-z])"), r"\g<n1> to \g<n2>\g<u>"),
        (re.compile(rf"(?<![\w.,-])(?P<sign>{_SIGNS})?(?P<a>{_NUMBER})\s?[-–—~]\s?(?P<sign2>{_SIGNS})?"
            rf"(?P<b>{_NUMBER})(?!\s*=)(?![\d-])"), _score_or_range),
        (re.compile(r"\b([Aa]partment|[Ss]eat|[Rr]ow|[Gg]ate|[Uu]nit|[Rr]oom|[Pp]latform|[Tt]rack|[Ss]uite"
            r"|[Ff]lat) (\d+)([A-Z])\b"), lambda m: f"{m[1]} {cardinal(m[2])} {m[3]}"),
        # money
        (re.compile(rf"(?<=\d)(?P<scale>[kKMB]|bn|m)?\s?[-–—]\s?(?=(?:{_SIGNS})\s?\d)"),
         lambda m: f"{m['scale'] or ''} to "),
        (re.compile(rf"(?P<minus>[-−](?=\D))?(?P<sign>(?-i:{_SIGNS}))\s?(?P<n>{_NUMBER}){scale}(?P<hyphen>-(?=[a-z]))?"
            rf"(?P<noun>(?=\s(?:bill|note|coin|gift|fee|fine|budget|prize|coupon|voucher|bonus|discount)s?\b))?",
         any_case), _money_before),
        (re.compile(rf"(?<![\w.,])(?P<n>{_NUMBER}){scale}\s?(?P<sign>{_SIGNS}|{_CODES})(?![\w])"), _money_after),
        (re.compile(rf"\b(?P<sign>{_CODES})\s?(?P<n>{_NUMBER}){scale}(?!\w)"), _money_after),
        (re.compile(rf"(?P<n>{_NUMBER})\s?¢"), lambda m: _counted(m["n"], "cent")),
        # measures
        (re.compile(r"(?<![\w./])(\d\.\d+)\s?/\s?(\d{1,3})(?![\w/]|\.\d)"),
         lambda m: f"{number(m[1])} out of {number(m[2])}"),
        (re.compile(r"(\b(?:blood pressure|BP)\b[^\d.;!?]{0,30}?)(\d{2,3})/(\d{2,3})(?![\w/])", any_case),
         lambda m: f"{m[1]}{_pairs(m[2]) if len(m[2]) == 3 else cardinal(m[2])} over {cardinal(m[3])}"),
        (re.compile(rf"(?<![\w./])(?:(?P<w>\d+)[ -])?(?P<a>\d+)\s?[/⁄]\s?(?P<b>\d+)(?![\w/]|\.\d)(?:(?:-|\s?)"
            rf"(?P<unit>{units})(?![\w/]))?"), _fraction),
        (re.compile(r"(?<![\w.])(\d+)\s?(?:ft\b\.?|feet)\s?(\d+)\s?(?:in\b\.?|inches|inch)"), _feet),
        (re.compile(r"(?<![\w.])(\d+)\s?['′’]\s?(\d+)\s?(?:\"|″|”|''|in\b)"), _feet),
        (re.compile(r"(?<![\w.])(\d+)\s?′()"), _feet),
        (re.compile(r"(?<![\w.])(\d+)\s?″"), lambda m: _counted(m[1], "inch")),
        (re.compile(r"(?<![\w.,])(\d{3,4})\s?[x×]\s?(\d{3,4})(?![\w,])"),
         lambda m: f"{_pairs(m[1])} by {_pairs(m[2])}"),
        (re.compile(rf"(?<=\d)\s?x\s?(?=(?:{_NUMBER})\s?=)"), " times "),
        (re.compile(rf"(?<![\w.,])(?P<n>{_NUMBER})\s?[x×]\s?(?=\d)"), lambda m: f"{number(m['n'])} by "
         if "x" in m[0] else f"{number(m['n'])} times "),
        (re.compile(r"(?<![\w.,])(\d+)x(?=\s*[-+−=^])|(?<=[-+−=] )(\d+)x\b"),
         lambda m: f"{cardinal(m[1] or m[2])} x"),
        (re.compile(r"(?<=\b[xyzn])(?:\s*[-−]\s*(?=\d)|\s+[-−]\s+(?=[\dxyzn]))"), " minus "),
        (re.compile(r"(?<![\w.,])(\d+(?:\.\d+)?)[x×](?![\w])"), lambda m: f"{number(m[1])} times"),
        (re.compile(rf"(?<![\w.,])(?P<minus>[-−])?(?P<n>{_NUMBER})(?:(?P<gap>\s)|(?P<hyphen>-))?(?P<unit>{units})"
            rf"(?P<power>\s?\^[23]\s?|[23](?![\w.]))?(?:\s?/\s?(?P<per>{per})(?![A-Za-z²]))?(?![A-Za-z0-9²³])"),
         _with_unit),
        (re.compile(rf"(?<![\w.,])(?P<n>{_NUMBER})(?P<scale>k|K|M|bn|B)(?!\w)"), lambda m: f"{number(m['n'])} k"
         if m["scale"] in "kK" and m["n"] in ("2", "4", "5", "8", "10") and not re.match(r"\s[a-z]+s\b",
         m.string[m.end() :]) else f"{number(m['n'])} {_SCALE[m['scale'].lower()]}"),
        # fractions, ordinals, decades, Roman numerals
        (re.compile(r"(?<![\w.])(\d{1,3}(?:,\d{3})+|\d+)(?:st|nd|rd|th)\b", any_case),
         lambda m: ordinal(int(m[1].replace(",", ""))) if len(m[1]) < 30 else m[0]),
        (re.compile(r"['’](\d\d)\b(?!['’\"])"), lambda m: " " + (cardinal(m[1]) if m[1][0] != "0"
         else "oh " + cardinal(m[1][1]))),
        (re.compile(rf"\b(?P<w>(?i:{_ROMAN_BEFORE})s? )(?P<r>{_ROMAN})\b"),
         lambda m: m["w"] + cardinal(str(_roman_value(m["r"]))) if m["r"] else m[0]),
        (re.compile(rf"\b(?P<w>(?:{_ROMAN_NAMES}) )(?P<r>{_ROMAN})\b(?!')"),
         lambda m: f"{m['w']}the {ordinal(_roman_value(m['r']))}" if m["r"] else m[0]),
        (re.compile(rf"(?<=[a-z] )(?P<r>(?=[IVX]{{2,}})(?!IV\b|X{{2,3}}\b|MIX\b){_ROMAN})\b"),
         lambda m: cardinal(str(_roman_value(m["r"]))) if m["r"] else m[0]),
        # years and codes
        (re.compile(rf"(?P<word>\b{_CODE_WORDS}{_CODE_LINK})(?P<code>\d{{3,}})(?![\d,]|\.\d)", any_case), _code),
        (re.compile(rf"\b((?:{_YEAR_WORDS})[ -])(1\d\d\d|20\d\d)\b(?![,.]\d|\s*(?:{_SCALES}|people|miles|meters"
            rf"|feet|dollars|euros|pounds|points|times|of)\b)", any_case), _year_like),
        (re.compile(r"(?<![\w.,$€£#-])()(19\d\d|20[0-4]\d)\b(?![,.]\d|%|-)(?!\s+(?:people|of|\w*(?:dollar|euro"
            r"|mile|step|calorie|student|word|point|user|time|page|year|day|meter|hour|minute|point|item|member"
            r"|vote|seat|car|book|employee|worker|soldier|feet|pound|visitor|guest|worker|job|unit"
            r"|copie)e?s)\b)"), _year_like),
        (re.compile(r"\b(\d{3}) (A\.?D\.?|B\.?C\.?(?:E\.?)?|C\.?E\.?)(?!\w)"),
         lambda m: f"{cardinal(m[1])} {' '.join(m[2].replace('.', ''))}"),
        (re.compile(r"\b(Boeing|Airbus|Highway|Hwy|Route|Interstate|Porsche|Peugeot|Nokia|RTX|GTX|[Bb]us|[Tt]rain"
            r"|[Ll]ine) (\d)(\d\d)\b"), lambda m: f"{m[1]} {_pairs(m[2] + m[3])}"),
        # letters with digits
        (re.compile(r"\b([A-Za-z]+)([-–]?)(\d+)([A-Za-z]{0,2})\b(?![.,]\d)"), _letters_number),
        (re.compile(r"\b(?P<n>\d+(?:\.\d+)?)-(?=[A-Za-z])"), lambda m: f"{number(m['n'])} "),
        (re.compile(r"\b(1080|1440|720|2160|480|360)(p|i)\b"), lambda m: f"{_pairs(m[1])} {m[2]}"),
        (re.compile(r"\b(\d+)([A-Za-z]{1,3})\b"), lambda m: f"{cardinal(m[1])} {m[2]}"),
        # what is left
        (re.compile(r"\^(\{[^{}]*\}|[-+]?\w+)\s?"), _power),
        (re.compile(r"(?<=[\w)])\s*[*×·]\s*(?=[\w(])"), " times "),
        (re.compile(r"(?<=\d)\s*[-−–]\s*(?=\d)"), " minus "),
        (re.compile(r"(?<![\w)])[-−–](?=\.?\d)"), "minus "),
        (re.compile(r"(?<=[\w)])\s+[-−]\s+(?=[\w(][\w\s^]*=)|(?<=squared)\s+[-−]\s+(?=[\w(])"), " minus "),
        (re.compile(r"#(?=\d)"), " number "),
        (re.compile(r"#(?=[^\W\d])"), " hashtag "),
        (re.compile(r"~\s?(?=\d)"), " about "),
        (re.compile(rf"(?<![\w]){_NUMBER}|\d+"), _plain),
    )  # fmt: skip


_RULES = _rules()
_LINK = re.compile(
    r"(?:(?:https?|ftp)://|\bwww\.)[^\s<>\"，。！？；、（）「」]*[\w/=&#]|(?<![\w.+-])[\w.+-]*\w@[\w-]+"
    r"(?:\.[\w-]+)+"
    r"|(?<![\w.@/-])(?:[a-z0-9-]+\.)+(?:com|org|net|io|ai|dev|edu|gov|co\.uk|cn|app|info)\b(?:/[\w./%~-]*[\w/])?",
    re.ASCII | re.IGNORECASE,
)
_INITIALS = re.compile(r"(?<![\w.])(?:[A-Za-z]\.){2,}(?:[A-Za-z](?![\w.]))?")
# Hyphens inside words, and the pronoun I, need none.
_NEEDS_RULES = re.compile(
    r"[\d½⅓⅔¼¾⅕-⅞⅑⅒^#~*×·$€£¥]|(?<![a-z])-|-(?![a-z])|\b(?:[A-Z][a-z]{1,8}\s?[-–—.]|(?:[IVXL]{2,}|[VXL]|XC[IVX]*)\b)"
)
_NUMBERED_I = re.compile(rf"\b(?:(?i:{_ROMAN_BEFORE})s?|{_ROMAN_NAMES}) I\b")
_SYMBOL = re.compile("|".join(re.escape(each) for each in _SYMBOLS))
_STREET = re.compile(
    r"(?<=\w )(?P<word>St|Dr)\.?(?=\s+(?:[a-z(]|[A-Z][a-z]+,)|\s*(?:[,;)]|$))|\b(?P<title>St|Dr)\.?(?=\s+[A-Z])"
)
_STREET_BEFORE = re.compile(r"(?:[A-Z][a-z]+|\d(?:st|nd|rd|th)) $")
_TITLES = {"St": ("Street", "Saint"), "Dr": ("Drive", "Doctor")}
_FILE_DOT = re.compile(
    r"(?<=\w)\.(?=(?:pdf|docx?|xlsx?|pptx?|txt|csv|json|ya?ml|xml|html?|md|py|jpe?g|png|gif|svg|mp[34]|wav|zip|exe"
    r"|log|toml|ini)\b(?!\.\w))",
    re.IGNORECASE,
)
_SLASH = re.compile(r"(?<=[^\W\d])\s?/\s?(?=[^\W\d])")


_WORDS = (
    (re.compile(r"\bw/o\b"), "without"),
    (re.compile(r"\bw/(?=\s|\w)"), "with "),
    (re.compile(r"\bvs\b"), "versus"),
    (re.compile(r"\bWW(?=I{1,2}\b)"), "World War "),
    (
        re.compile(
            r"(?<=[\dkKMB%€£¢])\s?/\s?(month|year|week|day|hour|night|person|user|mo|yr|hr|wk|lb|kg|oz|gal|kWh|GB)\b"
        ),
        lambda m: f" per {_PER.get(m[1]) or _UNITS.get(m[1], m[1])}",
    ),
    (
        re.compile(r"(?<=[a-z]s)/(month|year|week|day|hour|minute|min|second|sec|s)\b(?!/)"),
        lambda m: f" per {_PER[m[1]]}",
    ),
    (re.compile(r"(?<![\w./])\.(?=(?:NET|env|gitignore)\b)"), "dot "),
    (re.compile(r"\b40([13])\(([kb])\)"), lambda m: f"four oh {cardinal(m[1])} {m[2]}"),
    (re.compile(r"\b([CF])#(?!\w)"), r"\1 sharp"),
    (re.compile(r"<([A-Za-z]\w*(?:, ?\w+)*)>"), r" \1 "),
)


def _street(match: _Match) -> str:
    if match["word"]:
        is_address = _STREET_BEFORE.search(match.string, 0, match.start())
        if not is_address:
            return match[0]
        return _TITLES[match["word"]][0]
    return _TITLES[match["title"]][1] if match[0].endswith(".") or match["title"] == "Dr" else match[0]


def _abbreviation(match: _Match) -> str:
    assert match.lastindex is not None, "one of the alternatives matches"
    word = _ABBREVIATIONS[match.lastindex - 1][1]
    return word + ("." if match.end() == len(match.string.rstrip()) else "")


def has_abbreviation(text: str) -> bool:
    """Whether a word with a full stop behind it is short for another one."""
    return "." in text and _ABBREVIATION.search(text) is not None


def read_english(text: str) -> str:
    """The words of a clause without markup. Letters that are not English stay."""
    text = _FILE_DOT.sub(" dot ", _LINK.sub(_host, text))
    if "." in text or "St" in text or "Dr" in text:
        text = re.sub(r"(?<=\d)\s?(min|sec|hr)\.(?=\s+[a-z])", r" \1", text)
        text = _STREET.sub(_street, text)
        text = _ABBREVIATION.sub(_abbreviation, text)
        text = re.sub(r"\bPh\.\s?D\b\.?", "P h D", text)
    for pattern, word in _WORDS:
        text = pattern.sub(word, text)
    if _NEEDS_RULES.search(text) or (" I" in text and _NUMBERED_I.search(text)):
        for pattern, replacement in _RULES:
            text = pattern.sub(replacement, text)
    text = _INITIALS.sub(lambda found: " ".join(found[0].replace(".", "")) + " ", text)
    text = _SLASH.sub(" ", text)
    return _SYMBOL.sub(lambda found: f" {_SYMBOLS[found[0]]} ", text)
