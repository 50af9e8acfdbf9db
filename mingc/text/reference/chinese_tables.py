"""Lookup tables of the Chinese normaliser: characters, fixed names, currencies, units, trigger words, teams.

Data only. Sources: `char_map0`, `proper_noun` and the unit lists of the official `talker_tn/talker_re.json`, the unit
lists of the WeTextProcessing grammars, and the character changes observed in the official Chinese grammars.
"""

from __future__ import annotations

import unicodedata

from mingc.text.reference.chinese_numerals import read_cardinal

_NUMERAL_RANGES = (
    ("Ⅰ", "Ⅻ"),
    ("①", "⑳"),
    ("㉑", "㉟"),
    ("㊱", "㊿"),
    ("⓵", "⓾"),
    ("⓪", "⓪"),
    ("❶", "❿"),
    ("⓫", "⓴"),
)
_NUMERALS = {
    code: read_cardinal(str(int(unicodedata.numeric(chr(code)))))
    for first, last in _NUMERAL_RANGES
    for code in range(ord(first), ord(last) + 1)
}
# Full-width forms lie at a fixed distance from ASCII.
_FULL_WIDTH_DISTANCE = 0xFEE0
_FULL_WIDTH_DIGITS = {ord(digit) + _FULL_WIDTH_DISTANCE: digit for digit in "0123456789"}

NUMERAL_CHARACTERS: dict[int, str] = {**_NUMERALS, **_FULL_WIDTH_DIGITS}

_LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
_NARROWED_MARKS = "!\"$%&'()*+-./;<=>?@\\^_`{|}~"
NARROW_CHARACTERS: dict[int, str] = {
    **_FULL_WIDTH_DIGITS,
    **{ord(character) + _FULL_WIDTH_DISTANCE: character for character in _LETTERS + _NARROWED_MARKS},
    ord("“"): '"',
    ord("”"): '"',
}

PROPER_NAMES = {
    "上证50": "上证五十",
    "沪深300": "沪深三百",
    "中证500": "中证五百",
    "科创50": "科创五十",
    "标普500": "标普五百",
    "标准普尔500": "标准普尔五百",
    "道琼斯30": "道琼斯三十",
    "纳斯达克100": "纳斯达克一百",
    "罗素2000": "罗素两千",
    "富时100": "富时一百",
    "日经225": "日经二百二十五",
    "c++": "C加加",
    "C++": "C加加",
}


def _table(entries: str) -> dict[str, str]:
    return dict(entry.rsplit(":", 1) for entry in entries.split("|"))


def _words(words: str) -> list[str]:
    return words.split()


# Spelling is matched exactly in CURRENCIES and LATIN_UNITS, so `Kw` and `kw` are separate entries.
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
# Words that make the number before them a count, in the first stage only.
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

# Names after which `3-2` is a sports score. A selection.
_COUNTRIES = (
    "中国 日本 韩国 朝鲜 蒙古 越南 老挝 柬埔寨 泰国 缅甸 马来西亚 新加坡 印度尼西亚 菲律宾 "
    "文莱 印度 巴基斯坦 孟加拉国 尼泊尔 不丹 斯里兰卡 马尔代夫 阿富汗 伊朗 伊拉克 叙利亚 约旦 "
    "黎巴嫩 以色列 沙特阿拉伯 也门 阿曼 卡塔尔 科威特 巴林 土耳其 格鲁吉亚 亚美尼亚 阿塞拜疆 "
    "哈萨克斯坦 乌兹别克斯坦 吉尔吉斯斯坦 塔吉克斯坦 土库曼斯坦 俄罗斯 乌克兰 白俄罗斯 波兰 "
    "捷克共和国 斯洛伐克 匈牙利 罗马尼亚 保加利亚 希腊 阿尔巴尼亚 马其顿 克罗地亚 斯洛文尼亚 "
    "德国 奥地利 瑞士 列支敦士登 荷兰 比利时 卢森堡 法国 摩纳哥 英国 爱尔兰 西班牙 葡萄牙 "
    "安道尔 意大利 圣马力诺 马耳他 丹麦 挪威 瑞典 芬兰 冰岛 爱沙尼亚 拉脱维亚 立陶宛 摩尔多瓦 "
    "塞浦路斯 埃及 利比亚 突尼斯 阿尔及利亚 摩洛哥 苏丹 埃塞俄比亚 肯尼亚 乌干达 坦桑尼亚 "
    "卢旺达 索马里 尼日利亚 加纳 科特迪瓦 塞内加尔 马里 喀麦隆 加蓬 安哥拉 赞比亚 津巴布韦 "
    "莫桑比克 博茨瓦纳 纳米比亚 南非 马达加斯加 毛里求斯 美国 加拿大 墨西哥 古巴 牙买加 海地 "
    "巴拿马 哥斯达黎加 洪都拉斯 危地马拉 萨尔瓦多 尼加拉瓜 哥伦比亚 委内瑞拉 厄瓜多尔 秘鲁 "
    "玻利维亚 巴西 智利 阿根廷 乌拉圭 巴拉圭 澳大利亚 新西兰 斐济 巴布亚新几内亚"
)
TEAMS: frozenset[str] = frozenset(_COUNTRIES.split())

# Pairs of a traditional character and its simplified form. Common characters only.
_PAIRS = (
    "愛爱 礙碍 奧奥 壩坝 罷罢 擺摆 敗败 頒颁 辦办 幫帮 綁绑 寶宝 報报 貝贝 備备 輩辈 筆笔 畢毕 幣币 閉闭 "
    "邊边 編编 變变 標标 錶表 賓宾 餅饼 補补 財财 參参 殘残 慘惨 燦灿 倉仓 艙舱 層层 產产 場场 廠厂 長长 "
    "嘗尝 償偿 腸肠 車车 徹彻 塵尘 陳陈 襯衬 稱称 誠诚 懲惩 遲迟 齒齿 衝冲 蟲虫 寵宠 籌筹 醜丑 處处 礎础 "
    "傳传 創创 純纯 詞词 賜赐 聰聪 從从 竄窜 達达 帶带 貸贷 單单 擔担 膽胆 彈弹 當当 擋挡 黨党 檔档 導导 "
    "島岛 搗捣 燈灯 鄧邓 敵敌 遞递 點点 電电 墊垫 釣钓 調调 頂顶 訂订 東东 動动 凍冻 鬥斗 獨独 讀读 賭赌 "
    "斷断 鍛锻 隊队 對对 噸吨 頓顿 奪夺 額额 兒儿 爾尔 發发 罰罚 煩烦 範范 飯饭 販贩 訪访 紡纺 飛飞 費费 "
    "廢废 紛纷 墳坟 奮奋 憤愤 糞粪 豐丰 風风 楓枫 馮冯 縫缝 鳳凤 膚肤 輔辅 撫抚 負负 復复 複复 婦妇 該该 "
    "蓋盖 幹干 趕赶 岡冈 剛刚 鋼钢 綱纲 個个 給给 鞏巩 貢贡 構构 購购 顧顾 關关 觀观 館馆 慣惯 貫贯 廣广 "
    "規规 歸归 龜龟 軌轨 貴贵 國国 過过 漢汉 號号 轟轰 紅红 鴻鸿 護护 戶户 華华 畫画 劃划 話话 懷怀 壞坏 "
    "歡欢 環环 還还 換换 黃黄 揮挥 輝辉 匯汇 會会 繪绘 獲获 貨货 機机 積积 雞鸡 極极 級级 擠挤 計计 記记 "
    "紀纪 際际 濟济 繼继 夾夹 價价 駕驾 堅坚 間间 監监 艱艰 儉俭 檢检 減减 簡简 見见 鍵键 艦舰 漸渐 將将 "
    "獎奖 講讲 醬酱 膠胶 澆浇 驕骄 腳脚 較较 階阶 節节 結结 潔洁 緊紧 僅仅 進进 盡尽 勁劲 驚惊 經经 頸颈 "
    "靜静 鏡镜 競竞 淨净 糾纠 舊旧 舉举 劇剧 懼惧 據据 覺觉 絕绝 軍军 開开 凱凯 課课 墾垦 懇恳 庫库 褲裤 "
    "塊块 寬宽 礦矿 虧亏 擴扩 闊阔 來来 賴赖 蘭兰 攔拦 藍蓝 籃篮 爛烂 勞劳 樂乐 類类 淚泪 離离 裡里 裏里 "
    "禮礼 歷历 曆历 麗丽 勵励 連连 聯联 憐怜 臉脸 練练 戀恋 糧粮 涼凉 兩两 輛辆 諒谅 療疗 遼辽 臨临 鄰邻 "
    "靈灵 齡龄 領领 劉刘 龍龙 樓楼 爐炉 陸陆 錄录 亂乱 倫伦 輪轮 論论 羅罗 綠绿 媽妈 馬马 嗎吗 買买 賣卖 "
    "麥麦 滿满 貓猫 貿贸 沒没 門门 們们 夢梦 彌弥 綿绵 麵面 廟庙 滅灭 鳴鸣 銘铭 謀谋 畝亩 難难 腦脑 惱恼 "
    "內内 擬拟 鳥鸟 寧宁 紐纽 農农 濃浓 歐欧 盤盘 龐庞 賠赔 噴喷 鵬鹏 騙骗 飄飘 貧贫 頻频 憑凭 評评 撲扑 "
    "樸朴 齊齐 騎骑 豈岂 啟启 氣气 棄弃 牽牵 鉛铅 遷迁 謙谦 錢钱 淺浅 譴谴 槍枪 牆墙 強强 搶抢 橋桥 喬乔 "
    "竊窃 親亲 輕轻 傾倾 請请 慶庆 窮穷 區区 驅驱 趨趋 權权 勸劝 確确 讓让 擾扰 熱热 認认 紉纫 榮荣 絨绒 "
    "軟软 銳锐 潤润 灑洒 賽赛 傘伞 喪丧 掃扫 殺杀 曬晒 閃闪 傷伤 賞赏 燒烧 紹绍 設设 攝摄 審审 嬸婶 腎肾 "
    "聲声 繩绳 聖圣 師师 詩诗 時时 實实 識识 勢势 適适 釋释 試试 視视 飾饰 壽寿 獸兽 書书 輸输 樹树 術术 "
    "屬属 數数 帥帅 雙双 誰谁 稅税 順顺 說说 碩硕 絲丝 鬆松 聳耸 頌颂 蘇苏 訴诉 肅肃 雖虽 隨随 歲岁 孫孙 "
    "損损 縮缩 鎖锁 臺台 態态 攤摊 貪贪 談谈 歎叹 湯汤 濤涛 討讨 騰腾 題题 體体 條条 鐵铁 聽听 廳厅 銅铜 "
    "統统 頭头 圖图 塗涂 團团 託托 灣湾 頑顽 萬万 網网 為为 違违 圍围 維维 偉伟 衛卫 謂谓 溫温 聞闻 穩稳 "
    "問问 窩窝 烏乌 無无 務务 誤误 霧雾 習习 襲袭 戲戏 細细 蝦虾 峽峡 嚇吓 鮮鲜 閒闲 賢贤 顯显 險险 現现 "
    "縣县 線线 憲宪 獻献 鄉乡 詳详 響响 項项 嚮向 蕭萧 曉晓 協协 脅胁 寫写 謝谢 鋅锌 興兴 選选 學学 尋寻 "
    "訓训 訊讯 遜逊 壓压 鴨鸭 亞亚 煙烟 嚴严 鹽盐 顏颜 閻阎 驗验 楊杨 揚扬 陽阳 養养 樣样 搖摇 遙遥 藥药 "
    "爺爷 業业 頁页 葉叶 醫医 儀仪 遺遗 億亿 義义 藝艺 憶忆 議议 譯译 異异 陰阴 銀银 飲饮 隱隐 櫻樱 應应 "
    "營营 贏赢 擁拥 傭佣 優优 憂忧 郵邮 魚鱼 漁渔 與与 語语 預预 獄狱 禦御 譽誉 園园 員员 圓圆 緣缘 遠远 "
    "願愿 約约 閱阅 雲云 運运 雜杂 災灾 載载 暫暂 贊赞 髒脏 棗枣 責责 擇择 則则 澤泽 賊贼 贈赠 詐诈 債债 "
    "戰战 張张 漲涨 帳帐 賬账 趙赵 這这 針针 偵侦 鎮镇 陣阵 爭争 鄭郑 證证 織织 職职 執执 紙纸 摯挚 質质 "
    "鐘钟 鍾钟 終终 種种 眾众 諸诸 豬猪 燭烛 囑嘱 貯贮 築筑 駐驻 專专 磚砖 轉转 賺赚 莊庄 裝装 壯壮 狀状 "
    "準准 濁浊 資资 綜综 總总 縱纵 鄒邹 組组 鑽钻"
)
SIMPLIFIED: dict[int, str] = {ord(pair[0]): pair[1] for pair in _PAIRS.split()}
