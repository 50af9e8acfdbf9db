"""Reads the numbers, units and symbols of a Chinese clause; English words and names in it stay as they are.

As in `english`, the first rules rewrite notations with several numbers, and later ones read the digits that they leave.
"""

from __future__ import annotations

import re
from collections.abc import Callable

_Match = re.Match[str]
_DIGITS = "零一二三四五六七八九"
_PHONE = "零幺二三四五六七八九"
_NUMBER = r"\d{1,3}(?:,\d{3})+(?:\.\d+)?|\d+(?:\.\d+)?|\.\d+"
_UNITS = {
    "mm": "毫米", "cm": "厘米", "dm": "分米", "m": "米", "km": "公里", "μm": "微米", "µm": "微米", "um": "微米",
    "nm": "纳米", "mg": "毫克", "g": "克",
    "kg": "公斤", "KG": "公斤", "Kg": "公斤", "t": "吨", "μg": "微克", "µg": "微克", "ml": "毫升", "mL": "毫升",
    "ML": "毫升", "l": "升", "L": "升", "ms": "毫秒", "s": "秒", "min": "分钟", "h": "小时",
    "ns": "纳秒", "μs": "微秒", "Hz": "赫兹", "kHz": "千赫", "MHz": "兆赫", "GHz": "吉赫", "W": "瓦",
    "kW": "千瓦", "KW": "千瓦", "MW": "兆瓦", "kWh": "千瓦时",
    "V": "伏", "v": "伏", "kV": "千伏", "mV": "毫伏", "mA": "毫安", "mAh": "毫安时", "Wh": "瓦时", "Ω": "欧姆",
    "J": "焦耳", "kJ": "千焦", "cal": "卡", "kcal": "千卡", "Pa": "帕",
    "kPa": "千帕", "hPa": "百帕", "MPa": "兆帕", "N": "牛", "dB": "分贝", "db": "分贝", "KB": "KB",
    "℃": "摄氏度", "°C": "摄氏度", "°c": "摄氏度", "℉": "华氏度", "°F": "华氏度", "°": "度",
    "º": "度", "㎡": "平方米", "m²": "平方米", "m2": "平方米", "km²": "平方公里", "km2": "平方公里",
    "cm²": "平方厘米", "cm2": "平方厘米", "m³": "立方米", "m3": "立方米", "cm³": "立方厘米", "km/h": "公里每小时",
    "m^2": "平方米", "km^2": "平方公里", "cm^2": "平方厘米", "m^3": "立方米", "cm^3": "立方厘米",
    "mm^2": "平方毫米",
    "m/s": "米每秒", "kg/m³": "千克每立方米", "Mbps": "兆每秒", "Gbps": "吉每秒", "Kbps": "千比特每秒",
    "MB/s": "兆每秒", "rpm": "转每分钟", "mph": "英里每小时", "fps": "帧", "ha": "公顷", "hm²": "公顷",
    "GB": "GB", "MB": "MB", "TB": "TB", "G": "G", "ft": "英尺", "in": "英寸", "lb": "磅", "lbs": "磅",
    "oz": "盎司", "mi": "英里", "\"": "英寸", "mmHg": "毫米汞柱", "kgs": "公斤", "mol": "摩尔", "次/分": "次每分",
}  # fmt: skip
_LETTER_UNITS = {"GB": "G B", "MB": "M B", "TB": "T B", "KB": "K B", "G": "G"}
_CURRENCIES = {
    "HK$": "港元", "US$": "美元", "NT$": "新台币", "$": "美元", "€": "欧元", "£": "英镑", "¥": "元", "￥": "元",
    "₩": "韩元", "₹": "卢比", "₽": "卢布", "฿": "泰铢",
    "CNY": "元", "RMB": "元", "USD": "美元", "EUR": "欧元", "GBP": "英镑", "JPY": "日元", "HKD": "港元",
}  # fmt: skip
_SIGNS = "|".join(re.escape(each) for each in _CURRENCIES)
_SCALE = "(?:[十百千万亿]|百万|千万|万亿|[kKMB])"
# Words that count: 2 before them is 两. The rest of the measure words does not matter.
_MEASURES = (
    "个|只|条|张|本|位|名(?!列)|家|辆|台|件|套|双|杯|瓶|碗|盒|袋|包|箱|间|座|栋(?=楼|房)|幢|棵|朵|片|块|颗|粒|根|支|枝|把|顶|头|匹|群|"
    "次|遍|趟|回|场|顿|种|样|类|份|段|句|篇|首|部|集(?!团)|章(?!节)|层(?!楼)|排|列|组|队|对|封|道|项|笔|扇|面|口|滴|串|束|卷|盘|锅|桶|壶|"
    "天|周|星期(?![一二三四五六日天])|个月|年|小时|分钟|秒|刻钟|岁|点(?!\\d(?!\\d?分))|元|块|毛|万|千|亿|米|公里|千米|公斤|斤|吨|升|里|英里|英尺|英寸|倍|人|方|边|侧|端|手|"
    "代(?!码)|派|步|圈|页|处|所|门|班|架|艘|股|团|阵|届|批|桌|副|栏|轮|卡(?!车)|户|题|局|盏|株|叠|摞|行|帧|克|成(?!绩)|居室|室(?=一|两|\\d)"
)
_NOT_TWO = "月|日|号|楼|线|年级|班|路|等奖|级|月份|季度|世纪|环|栋|单元|区|组$|中|胎|战|维|手"
_DAY_PART = r"(?:凌晨|早上|早晨|清晨|上午|中午|下午|傍晚|晚上|夜里|半夜|深夜|今晚|明晚|明早|今早)"
_PHONE_WORDS = (
    r"(?:电话|手机|手机号|号码|热线|拨打|拨|打|呼叫|致电|联系|客服|传真|座机|微信|QQ|报警|尾号"
    r"|验证码|密码|卡号|账号|帐号|订单号?|运单号?|快递单?号?|单号|编号|工号|学号|身份证号?码?|邮编|邮政编码"
    r"|车牌号?|房间号?|代码"
    r"|序列号|航班号?|群号)"
)
_ROUTES = r"(?=\s*(?:路|号房|房间|房|室|次列车|次航班|路公交|国道|省道|医院))"
_PROVINCES = "京津沪渝冀豫云辽黑湘皖鲁新苏浙赣鄂桂甘晋蒙陕吉闽贵粤青藏川宁琼"
_SYMBOLS = {
    "%": "百分之", "+": "加", "=": "等于", "×": "乘", "÷": "除以", "<": "小于", ">": "大于", "≤": "小于等于",
    "≥": "大于等于", "≈": "约等于", "≠": "不等于", "±": "正负",
    "&": "和", "@": "艾特", "#": "", "°": "度", "℃": "摄氏度", "$": "美元", "€": "欧元", "£": "英镑", "¥": "元",
    "√": "根号", "π": "派", "∞": "无穷大", "→": "到", "~": "到", "|": "，",
    "*": "乘", "^": "的", "©": "", "®": "", "™": "", "_": " ", "‰": "千分之", "μ": "微", "Ω": "欧姆",
    "㎡": "平方米", "…": "，", "•": "，", "\\": " ", "½": "二分之一",
}  # fmt: skip


def digits(text: str, names: str = _DIGITS) -> str:
    return "".join(names[int(each)] if each.isdecimal() else each for each in text)


def cardinal(text: str) -> str:
    """12000 → 一万两千, 205 → 二百零五, 10012 → 一万零一十二; digit by digit beyond 兆 or after a leading zero."""
    text = text.replace(",", "")
    if len(text) > 16 or (len(text) > 1 and text[0] == "0"):
        return digits(text)
    value = int(text)
    if value == 0:
        return "零"
    words, places = "", (("兆", 10**12), ("亿", 10**8), ("万", 10**4), ("", 1))
    for name, size in places:
        group, value = divmod(value, size)
        if group:
            part = _below_ten_thousand(group, is_first=not words)
            if words and group < 1000:
                part = "零" + part
            if group == 2 and name and not words:
                part = "两"
            words += part + name
    return words


def _below_ten_thousand(value: int, *, is_first: bool) -> str:
    words, is_gap = "", False
    for name, size in (("千", 1000), ("百", 100), ("十", 10), ("", 1)):
        digit, value = divmod(value, size)
        if not digit:
            is_gap = bool(words)
            continue
        if is_gap:
            words += "零"
        is_gap = False
        if digit == 2 and name == "千":
            words += "两" + name
        elif digit == 1 and name == "十" and not words and is_first:
            words += name
        else:
            words += _DIGITS[digit] + name
    return words


def number(text: str) -> str:
    whole, _, fraction = text.partition(".")
    words = cardinal(whole or "0")
    return f"{words}点{digits(fraction)}" if fraction else words


def _signed(text: str) -> str:
    return "负" + number(text[1:]) if text[0] in "-−" else number(text)


def _date(match: _Match) -> str:
    month, day = int(match["m"]), int(match["d"])
    if not (1 <= month <= 12 and 1 <= day <= 31):
        return match[0]
    return f"{digits(match['y'])}年{cardinal(str(month))}月{cardinal(str(day))}日"


def _time(match: _Match) -> str:
    hour, minute, second = int(match["h"]), int(match["min"]), match["s"]
    if hour > 24 or minute > 59:
        return match[0]
    words = ("两" if hour == 2 else cardinal(str(hour))) + "点"
    if minute == 30 and not second:
        words += "半" if match["part"] else "三十分"
    elif minute or second:
        words += ("零" if minute < 10 else "") + cardinal(str(minute)) + "分"
    if second:
        words += cardinal(str(int(second))) + "秒"
    return (match["part"] or "") + words + (_half_day(match["half"]) if match["half"] else "")


def _half_day(letter: str) -> str:
    return f" {letter} m "


def _counted(text: str, after: str) -> str:
    """A number in front of a measure word or unit."""
    return "两" if text == "2" and not re.match(_NOT_TWO, after) else number(text)


def _money(match: _Match) -> str:
    return _counted(match["n"], "元") + _scale(match["scale"]) + _CURRENCIES[match["sign"]]


def _scale(text: str | None) -> str:
    return {"k": "千", "K": "千", "M": "百万", "B": "十亿"}.get(text or "", text or "")


def _unit(match: _Match) -> str:
    minus, unit = match["minus"], match["unit"]
    name = _LETTER_UNITS.get(unit) or _UNITS[unit]
    sign = ("零下" if "度" in name else "负") if minus else ""
    amount = match["n"]
    words = (
        "两"
        if amount == "2" and name not in ("度", "摄氏度") and name not in _LETTER_UNITS.values() and not minus
        else number(amount)
    )
    return f"{sign}{words} {name}" if name.isascii() else f"{sign}{words}{name}"


def _percent(match: _Match) -> str:
    words = "百" if match["n"] == "100" else number(match["n"])
    return f"{'百分之' if match['word'] == '%' else '千分之'}{'负' if match['minus'] else ''}{words}"


def _letters_number(match: _Match) -> str:
    """`A380`, `GPT-4`, `iPhone 15`: digit by digit from three digits on."""
    letters, value, after = match[1], match[2], match[3] or ""
    words = digits(value) if len(value) > 2 or value[0] == "0" else cardinal(value)
    return f"{letters} {words}{' ' + after if after else ''}"


def _fraction(match: _Match) -> str:
    whole, above, below = match["w"], match["a"], match["b"]
    words = f"{number(below)}分之{number(above)}"
    return f"{number(whole)}又{words}" if whole else words


_NAMED = {".": "点", "@": " at ", "/": "斜杠", "-": "杠", "_": "下划线", ":": "冒号"}


def _link(match: _Match) -> str:
    text = re.split(r"[?#]", re.sub(r"^[a-z]+://", "", match[0], flags=re.IGNORECASE))[0].rstrip("/")
    text = text.removeprefix("www.") if text.count(".") > 1 else text
    text = re.sub(r"[.@/_:-]", lambda sign: f" {_NAMED[sign[0]]} ", text)
    return f" {re.sub('[0-9]+', lambda found: digits(found[0]), text)} "


def _rules() -> tuple[tuple[re.Pattern[str], str | Callable[[_Match], str]], ...]:
    units = "|".join(re.escape(each) for each in sorted(_UNITS, key=len, reverse=True))
    date = r"(?<![\d.])(?P<y>\d{4})(?P<sep>[-/.])(?P<m>\d{1,2})(?P=sep)(?P<d>\d{1,2})(?![\d.-])(?:[日号T])?"
    return (
        (re.compile(r"(\d)\s*([½⅓⅔¼¾])"), lambda m: f"{number(m[1])}又{_FRACTIONS[m[2]]}"),
        (re.compile(r"[½⅓⅔¼¾⅛]"), lambda m: _FRACTIONS[m[0]]),
        # dates and years
        (re.compile(date), _date),
        (re.compile(r"(?<![\d/])(?P<m>\d{1,2})/(?P<d>\d{1,2})/(?P<y>\d{4})(?![\d/])"), _date),
        (re.compile(r"(?<=[日号月年点分])\s*[-–—~～]\s*(?=\d)"), "到"),
        (re.compile(r"(?<!\d)(\d{4}|\d{2}(?=年\d))年(\d{1,2})月(?:(\d{1,2})([日号]))?"),
         lambda m: f"{digits(m[1])}年{cardinal(m[2].lstrip('0'))}月" + (f"{cardinal(m[3].lstrip('0'))}{m[4]}"
         if m[3] else "")),
        (re.compile(r"(?<!\d)(\d{4}|\d{2}(?=[/-]))(?:年)?\s*[-–—~～至到/]+\s*(\d{4}|\d{2})(?=年)(?!年(?:级|龄|后"
            r"|前|来|间的))"), lambda m: f"{digits(m[1])}到{digits(m[2])}" if len(m[1]) == 4 else m[0]),
        (re.compile(r"(?<!\d)([12]\d{3})(?=年(?!前|后|的时间)|届|级|款|版|[财学]年)"), lambda m: digits(m[1])),
        (re.compile(r"(?<![\d一-龥])([12]\d{3})[-–—~～]([12]\d{3})(?![\d-])"),
         lambda m: f"{digits(m[1])}到{digits(m[2])}"),
        (re.compile(r"(?<!\d)(0\d|\d0|\d[1-9])(?=后(?:[^\d天年]|$)|级)"), lambda m: digits(m[1])),
        (re.compile(r"(?<!\d)(\d{1,2})月(\d{1,2})(?=[日号])"),
         lambda m: f"{cardinal(m[1].lstrip('0'))}月{cardinal(m[2].lstrip('0'))}"),
        (re.compile(rf"(?<=[{_PROVINCES}])([A-Z])[·\s]?([A-Z0-9]{{5,6}})(?![A-Za-z0-9])"),
         lambda m: f" {m[1]} " + re.sub(r"[A-Z]", r" \g<0> ", digits(m[2]))),
        # addresses, versions, telephones
        (re.compile(r"(?<![\d.])\d{1,3}(?:\.\d{1,3}){3}(?![\d.])"), lambda m: "点".join(digits(each)
         for each in m[0].split("."))),
        (re.compile(r"([vV])?(?<![\d.])(\d+(?:\.\d+){2,})(?![\d.]*\d)"), lambda m: ("V " if m[1]
         else "") + "点".join(cardinal(each) for each in m[2].split("."))),
        (re.compile(r"\b[vV](\d+(?:\.\d+)?)(?![\d.]*\d)"), lambda m: f"V {number(m[1])}"),
        (re.compile(r"(?<![\d.])(?:\+?86[- ]?)?1[3-9]\d(?:[- ]?\d{4}){2}(?!\d)"), lambda m: ("加" if "+" in m[0]
         else "") + digits(re.sub(r"\D", "", m[0]), _PHONE)),
        (re.compile(r"(?<![\d.])(?:0\d{2,3}[- ]?(?:\d{7,8}|\d{3,4}[- ]\d{4})(?:-\d{1,4})?"
            r"|[48]00-?\d{3,4}-?\d{3,4}|\d{3}-\d{4}(?:-\d{4})?|\d{3}-\d{3}-\d{4})(?![\d-])"),
         lambda m: digits(re.sub(r"\D", "", m[0]), _PHONE)),
        (re.compile(rf"(?P<word>{_PHONE_WORDS}(?:[是为：:\s]|号码|号|尾号)*)(?P<n>\d{{3,}}(?:[- ]\d+)*)"
            rf"(?![\d.]*[年月日元%])"), lambda m: m["word"] + digits(re.sub(r"\D", "", m["n"]), _PHONE)),
        (re.compile(r"(?<!\d)(10086|10010|10000|12306|12345|12315|12320)(?=$"
            r"|[^\d.,年月日元个人万%℃米公斤克吨岁页A-Za-z])"), lambda m: digits(m[1], _PHONE)),
        (re.compile(rf"(?<![\d.第])(\d{{3,4}}){_ROUTES}"), lambda m: digits(m[1], _PHONE)),
        (re.compile(r"(?<!\d)(\d{11,})(?![\d,.]|\d*[元个万亿])"), lambda m: digits(m[1], _PHONE)),
        (re.compile(r"\+\d{1,3}(?:[- ]?\d{2,5}){2,4}(?!\d)"), lambda m: "加" + digits(re.sub(r"\D", "", m[0]),
         _PHONE)),
        (re.compile(r"(?<!\d)(618|315|520|996|985|211)(?=大促|晚会|工作制|高校|大学|院校|购物|活动|工程)"),
         lambda m: digits(m[1])),
        (re.compile(r"(?<!\d)([12]\d{3})(?:[-–/](\d{2}|\d{4}))?(?=赛季|学年|年度|财年)"),
         lambda m: digits(m[1]) + (f"到{digits(m[2])}" if m[2] else "")),
        (re.compile(r"(?<!\d)(110|119|120|122|114|911)(?=报警|火警|急救|查号|电话|热线|事件)|(?<=或)(110|119|120)(?=$|[，。])"),
         lambda m: digits(m[0], _PHONE)),
        (re.compile(r"(?<![\d.])(\d{3,5})(?=端口|错误)"), lambda m: digits(m[1])),
        (re.compile(r"(?<![\d.])(\d{1,2})·(\d{1,2})(?!\d|\s*=)"), lambda m: digits(m[1] + m[2])),
        (re.compile(r"(?<=[图表])\s?(\d+)-(\d+)"), lambda m: f"{cardinal(m[1])}杠{cardinal(m[2])}"),
        (re.compile(r"(?<![\d.])([1-9][1-9])(?=折)"), lambda m: digits(m[1])),
        (re.compile(r"(?<=\d米)(\d\d)(?![\d.A-Za-z厘毫米])"), lambda m: digits(m[1])),
        # times, scores, ratios
        (re.compile(rf"(?<=\d:\d\d)\s*[-–—~～]\s*(?={_DAY_PART}?\d{{1,2}}:\d\d)"), "到"),
        (re.compile(r"(比分|比例|比率|比例尺|以|赢|胜|负|输|平|配比|按)(?P<b>[^\d，。]{0,6}?)"
            r"(?P<x>\d+)\s*[:：-]\s*(?P<y>\d+)(?![\d:])"),
         lambda m: f"{m[1]}{m['b']}{number(m['x'])}比{number(m['y'])}"),
        (re.compile(r"(?<!\d)(\d{1,3})[-:：](\d{1,3})(?=.{0,4}(?:胜|击败|领先|落后|战平|逆转|负于))"),
         lambda m: f"{number(m[1])}比{number(m[2])}"),
        (re.compile(rf"(?P<part>{_DAY_PART}\s*)?(?<![\d:])(?P<h>\d{{1,2}})[:：](?P<min>[0-5]\d)(?:[:：]"
            rf"(?P<s>[0-5]\d))?(?:\s*(?P<half>[aApP])\.?[mM]\b\.?)?(?![\d:])(?!的?比)"), _time),
        (re.compile(r"(?<![\d:])(\d+(?:\.\d+)?)\s*[:：]\s*(\d+(?:\.\d+)?)(?:[:：](\d+))?(?![\d:])"),
         lambda m: f"{number(m[1])}比{number(m[2])}" + (f"比{number(m[3])}" if m[3] else "")),
        (re.compile(r"(?<!\d)(\d{1,2})\s*([ap])\.?m\b\.?", re.IGNORECASE),
         lambda m: f"{cardinal(m[1])}{_half_day(m[2].lower())}"),
        (re.compile(r"(?<!\d)24/7(?!\d)"), "二十四七"),
        (re.compile(r"(?<!\d)7\s*[xX×*]\s*24(?=小时|$|[^\d])"), "七乘二十四"),
        # money, percent, units; a range has the unit of its end
        (re.compile(rf"(?P<n1>{_NUMBER})\s*(?P<u>%|℃|°C|°|{units})\s*[-–—~～]+\s*(?P<n2>[-−]?(?:{_NUMBER}))\s*"
            rf"(?P=u)(?![A-Za-z])"), r"\g<n1>\g<u>到\g<n2>\g<u>"),
        (re.compile(rf"(?P<s>{_SIGNS})\s?(?P<a>{_NUMBER})\s*[-–—~～]\s*(?:{_SIGNS})?\s?(?P<b>{_NUMBER})"),
         lambda m: f"{number(m['a'])}到{m['s']}{m['b']}"),
        (re.compile(rf"(?<![\d.])(?P<n1>{_NUMBER})\s*[-–—~～]\s*(?P<n2>[-−]?(?:{_NUMBER}))\s*(?P<u>%)"),
         r"\g<n1>%到\g<n2>%"),
        (re.compile(rf"(?P<minus>[-−])(?P<n1>{_NUMBER})\s*[-–—~～]\s*(?P<n2>[-−]?(?:{_NUMBER}))\s*(?P<u>℃|°C"
            rf"|°F)"), r"-\g<n1>\g<u>到\g<n2>\g<u>"),
        (re.compile(rf"(?P<sign>{_SIGNS})\s?(?P<n>{_NUMBER})(?P<scale>{_SCALE})?元?"), _money),
        (re.compile(rf"(?P<n>{_NUMBER})(?P<scale>{_SCALE})?\s?(?P<sign>{_SIGNS})"), _money),
        (re.compile(rf"(?P<minus>(?<![\d%])[-−])?(?P<n>{_NUMBER})\s?(?P<word>%|‰)"), _percent),
        (re.compile(r"(?<=[百千万亿零一二三四五六七八九十%])\s*[-–—~～]+\s*(?=百分之)"), "到"),
        (re.compile(rf"(?<![A-Za-z\d.,])(?P<n1>{_NUMBER})\s*[-–—~～]\s*(?P<n2>{_NUMBER})(?![\d-])(?!\s*=)"),
         r"\g<n1>到\g<n2>"),
        (re.compile(rf"(?P<minus>(?<![\d\w])[-−]|(?<=[一-龥])[-−])?(?<![A-Za-z\d.])(?P<n>{_NUMBER})\s?"
            rf"(?P<unit>{units})(?![A-Za-z0-9])"), _unit),
        # fractions, ordinals, mathematics
        (re.compile(r"(血压[^\d，。]{0,6})(\d{2,3})/(\d{2,3})(?![\d/])"),
         lambda m: f"{m[1]}{number(m[2])}，{number(m[3])}"),
        (re.compile(r"(?<![\d/.])(\d+\.\d+)\s?/\s?(\d+)(?![\d/])"), lambda m: f"{number(m[2])}分之{number(m[1])}"),
        (re.compile(r"(?<![\d/.])(?:(?P<w>\d+)\s)?(?P<a>\d+)\s?[/⁄]\s?(?P<b>\d+)(?![\d/])"), _fraction),
        (re.compile(r"第\s?(\d+)(?!\.?\d)"), lambda m: f"第{cardinal(m[1])}"),
        (re.compile(r"(?<=\d)\s*[-−]\s*(?=\d+\s*=)"), "减"),
        (re.compile(r"\^2\s?"), "的平方"),
        (re.compile(r"\^3\s?"), "的立方"),
        (re.compile(r"\^\{?(-?\d+)\}?\s?"), lambda m: f"的{_signed(m[1])}次方"),
        (re.compile(r"(?<=\d)\s*[xX×*·]\s*(?=\d)"), "乘"),
        # letters with digits
        (re.compile(r"(?<![A-Za-z])N[Oo]\.\s?(?=\d)"), "number "),
        (re.compile(r"(?<![A-Za-z])([A-Za-z]+(?:\+\+)?)[-–\s]?(\d+)(?![\d.,]*\d)([A-Za-z]+)?(?!\w*[年月日])"),
         _letters_number),
        (re.compile(r"([A-Za-z]+)[-–\s]?(\d+\.\d+)"), lambda m: f"{m[1]} {number(m[2])}"),
        (re.compile(r"(?<!\d)(4|5|3|2|6)([GgKkDd])(?![A-Za-z])"), lambda m: f"{cardinal(m[1])} {m[2]}"),
        (re.compile(r"(?<!\d)(\d+)([xX])(?![A-Za-z\d])"), lambda m: f"{cardinal(m[1])}倍"),
        # counts
        (re.compile(rf"(?<![\d.])({_NUMBER})(k|K|w|W)(?![A-Za-z])"), lambda m: number(m[1]) + ("千"
         if m[2] in "kK" else "万")),
        (re.compile(rf"(?<![\d.,±])2(?=\s?(?:{_MEASURES}))(?!\s?(?:{_NOT_TWO}))"), "两"),
        (re.compile(r"(?<=[一-龥：:，\s(（])[-−](?=\d)|^[-−](?=\d)"), "负"),
        (re.compile(rf"{_NUMBER}|\d+"), lambda m: number(m[0])),
    )  # fmt: skip


_FRACTIONS = {
    "½": "二分之一",
    "⅓": "三分之一",
    "⅔": "三分之二",
    "¼": "四分之一",
    "¾": "四分之三",
    "⅛": "八分之一",
}
_RULES = _rules()
_SYMBOL = re.compile("|".join(re.escape(each) for each in _SYMBOLS))
_NEEDS_RULES = re.compile(r"[\d½⅓⅔¼¾⅛^]")
_LINK = re.compile(
    r"(?:(?:https?|ftp)://|www\.)[!-~]*[A-Za-z0-9/=&#]|[A-Za-z0-9.+_-]+@[A-Za-z0-9-]+(?:\.[A-Za-z0-9-]+)+"
    r"|(?<![A-Za-z0-9.@/-])(?:[A-Za-z0-9-]+\.)+(?:com|org|net|io|ai|dev|edu|gov|cn|app|info)(?![A-Za-z0-9])"
    r"(?:/[A-Za-z0-9./%~_-]*[A-Za-z0-9/])?"
)
_AROUND = re.compile(r"(?<=[一-龥])(?=[A-Za-z])|(?<=[A-Za-z])(?=[一-龥])")


# Compiled here: it takes milliseconds, for which the first Chinese answer would wait.
_PER_IDEOGRAPH = re.compile(r"(?<=[元块分次件人亿万吨斤里米克时升])\s?/\s?(?=[一-龥])")
_BETWEEN_IDEOGRAPHS = re.compile(r"(?<=[一-龥])\s?/\s?(?=[一-龥])")


def read_chinese(text: str) -> str:
    """The words of a clause without markup."""
    text = _LINK.sub(_link, text)
    if _NEEDS_RULES.search(text):
        for pattern, replacement in _RULES:
            text = pattern.sub(replacement, text)
    text = _SYMBOL.sub(lambda found: _SYMBOLS[found[0]], text)
    text = _BETWEEN_IDEOGRAPHS.sub("，", _PER_IDEOGRAPH.sub("每", text))
    return _AROUND.sub(" ", text.replace("/", " "))
