"""What stands beside a number and how it is said: currencies, units, classifiers, words that call for a serial.

Facts only, no rules. Source: `talker_tn/talker_re.json` of the official code and the unit lists of the
WeTextProcessing grammars it ships. The spelling of a unit is matched exactly, so both `Kw` cases are listed or none.
"""

from __future__ import annotations


def _table(entries: str) -> dict[str, str]:
    return dict(entry.rsplit(":", 1) for entry in entries.split("|"))


def _words(words: str) -> list[str]:
    return words.split()


CURRENCIES = _table(
    "A$:澳元|AED:阿联酋迪拉姆|ARS:阿根廷比索|AUD:澳元|CAD$:加元|CAD:加元|CHF:瑞士法郎|CNY:人民币|EUR:欧元成员国|"
    "GBP:英镑|HK＄:港元|HKD:港元|INR:印度卢比|J￥:日元|JPY￥:日元|JPY:日元|KRW:韩元|RUB:俄罗斯卢布|"
    "SAR:沙特阿拉伯里亚尔|SEK:瑞典克朗|SGD:新加坡元|THB:泰铢|TRY:土耳其里拉|USD:美元|"
    "JP￥:日元|JP¥:日元|RMB:元|$:美元|£:英镑|￡:英镑|¥:元|￥:元|฿:泰铢|€:欧元|₹:印度卢比|₽:卢布|R$:巴西雷亚尔"
)

LATIN_UNITS = _table(
    "amu:原子质量|bar:巴|cm2:平方厘米|cm²:平方厘米|cm3:立方厘米|cm³:立方厘米|cm:厘米|cwt:美担|"
    "°c:摄氏度|°C:摄氏度|ºc:摄氏度|ºC:摄氏度|℃:摄氏度|°f:华氏度|°F:华氏度|℉:华氏度|º:度|°:度|"
    "db:分贝|dm3:立方分米|dm³:立方分米|dm:分米|ds:毫秒|ft:英尺|gb:吉字节|ghz:吉赫兹|gpa:吉帕斯卡|"
    "gwh:吉瓦时|gw:吉瓦|gy:戈瑞|h:小时|ha:公顷|hz:赫兹|kbps:千比特每秒|kcal:千卡|kgf:千克力|kg:千克|"
    "khz:千赫兹|km2:平方千米|km²:平方千米|km:千米|kpa:千帕|kwh:千瓦时|kw:千瓦|kW:千瓦|lbs:磅|lb:磅|"
    "m2:平方米|m²:平方米|m3:立方米|m³:立方米|mbps:兆比特每秒|mg:毫克|mhz:兆赫兹|mi2:平方英里|mi²:平方英里|"
    "min:分钟|mi:英里|ml:毫升|mm2:平方毫米|mm²:平方毫米|mm:毫米|mol:摩尔|mpa:兆帕|mph:英里每小时|ms:毫秒|"
    "mv:毫伏|mw:毫瓦|m:米|ng:纳克|nm:纳米|ns:纳秒|oz:盎司|pa:帕斯卡|pg:皮克|ps:皮秒|rad:弧度|rpm:转每分|"
    "sq ft:平方英尺|sq mi:平方英里|sv:系沃特|s:秒|tb:太字节|tj:万亿焦耳|tl:台两|v:伏特|yd:码|"
    "μg:微克|μm:微米|μs:微秒|ω:欧米茄|"
    "Pa:帕斯卡|kL:千升|W:瓦特|μL:微升|byte:字节|KJ:千焦|L:升|dL:分升|dl:分升|fL:飞升|fl:飞升|U:单位|IU:单位|kN:千牛|"
    "bit:比特|mmol:毫摩尔|μmol:微摩尔|MPa:兆帕|MW:兆瓦|Ω:欧姆|kPa:千帕|V:伏特|psi:磅每平方英寸|A:安培|㎡:平方米|"
    "J:焦耳|mL:毫升|F:法拉|bpm:次每分|mEq:毫当量|in:英寸|mmHg:毫米汞柱|t:吨|kJ:千焦|mV:毫伏|μl:微升|ul:微升|"
    "KW:千瓦|kWh:千瓦时|g:克|day:天|kHz:千赫|N:牛顿|cal:卡路里|mAh:毫安时|Hz:赫兹|MHz:兆赫|mA:毫安"
)

_CLASSIFIERS = (
    "票多余几集档具趟人篇帧把封艘套段号匹张座回场尾条个首阙阵网炮顶丘棵只支袭辆挑担颗壳窠曲墙群腔砣客贯扎捆刀令手罗坡"
    "山岭江溪钟队单双对口头脚板跳枝件贴针线管名位身堂课本页家户层丝毫厘分钱两斤铢石钧锱忽克寸尺丈里寻常铺程米撮勺合升斗"
    "盘碗碟叠桶笼盆盒杯斛锅簋篮罐瓶壶卮盏箩箱煲啖袋钵月日季刻时周天秒旬纪岁世更夜春夏秋冬代伏辈丸泡粒幢堆根道面片块架"
    "元吨度字兆"
)
_LARGE_NUMBERS = ("亿", "千万", "百万", "万", "千", "百")
CHINESE_UNITS: frozenset[str] = frozenset(
    {
        *_CLASSIFIERS,
        *_words(
            "年来 年前 年后 年内 年之前 年之后 平方 平米 立方 公里 小时 千米 分米 厘米 毫米 微米 纳米 摄氏度"
        ),
        *(number + unit for number in _LARGE_NUMBERS for unit in ("", *"块角毛分元")),
    }
)
# What makes the number before it a count in the regex stage only.
WORDS_AFTER_COUNTS = {**{word: word for word in _words("年 笔 到 至 的 圈 等于 强 指数 加上 点")}, "#": "号"}

WORDS_BEFORE_COUNTS = {
    **{word + verb: word + verb for word in _words("门票 套票 价格 花费") for verb in ("", "是", "为")},
    "等于": "等于",
    **{name + space: name for name in ("iOS", "Android", "Windows") for space in ("", " ")},
}
WORDS_BEFORE_SERIALS: frozenset[str] = frozenset(
    {
        *(
            word + verb
            for word in _words("id ID 学号 身份证 手机 手机号 电话 尾号")
            for verb in ("", "是", "为")
        ),
        "FM",
        "AM",
    }
)
WORDS_AFTER_SERIALS: frozenset[str] = frozenset({"APP"})
