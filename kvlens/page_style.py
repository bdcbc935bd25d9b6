"""How an effect looks: the colour steps, the style sheet for light and dark, and text that shows what it hides.

1. An effect becomes one of `2 * N_STEPS + 1` steps: orange for tokens that the target needs, blue for tokens it is
   better without, no tint near 0. Blue and orange stay apart for every common kind of colour blindness.
2. The steps run straight from the page's ground to the end colour; the text keeps a contrast of 4.5 or more on each.
3. Characters that would be invisible, or would act on the page or the terminal, are shown as signs.
"""

from __future__ import annotations

import math
import unicodedata

N_STEPS = 8
LIGHT = {
    "ground": "#ffffff",
    "ink": "#1c1e21",
    "soft": "#5a6169",
    "line": "#d5d9de",
    "plus": "#f3913a",
    "minus": "#6aa9e4",
}
DARK = {
    "ground": "#14171b",
    "ink": "#f1f3f5",
    "soft": "#a7b0ba",
    "line": "#3a414a",
    "plus": "#a55204",
    "minus": "#2b66a6",
}

_SIGNS = {"\n": "↵", "\t": "⇥", "\x7f": "␡"}


def step(effect: float | None, scale: float, noise: float) -> int:
    """The colour step of an effect, from -N_STEPS to N_STEPS; 0 when unknown, within the noise, or next to nothing."""
    if effect is None or math.isnan(effect) or abs(effect) <= noise or scale <= 0:
        return 0
    size = round(min(abs(effect) / scale, 1.0) * N_STEPS)
    return size if effect > 0 else -size


def step_class(number: int) -> str:
    """The CSS class of a colour step; empty for step 0."""
    return f"{'p' if number > 0 else 'm'}{abs(number)}" if number else ""


def colours(theme: dict[str, str]) -> dict[str, str]:
    """Every colour of a theme by its CSS name, the steps included."""
    steps = {
        f"{sign}{number}": _mix(theme["ground"], theme[end], 0.1 + 0.9 * number / N_STEPS)
        for sign, end in (("p", "plus"), ("m", "minus"))
        for number in range(1, N_STEPS + 1)
    }
    return {name: theme[name] for name in ("ground", "ink", "soft", "line")} | steps


def visible(text: str) -> str:
    """`text` with control, direction and half characters as signs: safe to print, and nothing is hidden."""
    return "".join(_SIGNS.get(char) or _sign(char) for char in text)


def _sign(char: str) -> str:
    code = ord(char)
    if code < 0x20:
        return chr(0x2400 + code)
    if unicodedata.category(char) in ("Cc", "Cs", "Zl", "Zp") or _turns_direction(code):
        return f"⟨{code:04X}⟩"
    return char


def _turns_direction(code: int) -> bool:
    return 0x202A <= code <= 0x202E or 0x2066 <= code <= 0x2069 or code in (0x200E, 0x200F, 0x061C, 0xFEFF)


def _mix(start: str, end: str, share: float) -> str:
    pairs = [(int(start[i : i + 2], 16), int(end[i : i + 2], 16)) for i in (1, 3, 5)]
    return "#" + "".join(f"{round(a + (b - a) * share):02x}" for a, b in pairs)


def style_sheet() -> str:
    """The CSS of a page or a notebook view; it follows the reader's light or dark, and the notebook's own theme."""
    light = ";".join(f"--{name}:{value}" for name, value in colours(LIGHT).items())
    dark = ";".join(f"--{name}:{value}" for name, value in colours(DARK).items())
    steps = "".join(f".kvlens .{name}{{background:var(--{name})}}" for name in colours(LIGHT) if name[1:].isdigit())
    return f"""
.kvlens{{color-scheme:light;{light}}}
@media (prefers-color-scheme:dark){{.kvlens{{color-scheme:dark;{dark}}}}}
[data-jp-theme-light="true"] .kvlens,.vscode-light .kvlens{{color-scheme:light;{light}}}
[data-jp-theme-light="false"] .kvlens,.vscode-dark .kvlens{{color-scheme:dark;{dark}}}
{_RULES}{steps}"""


_RULES = """
html:has(.kvlens.page),body:has(>.kvlens.page){margin:0}
.kvlens{background:var(--ground);color:var(--ink);font:16px/1.5 system-ui,-apple-system,"Segoe UI",sans-serif;
 padding:1rem;text-align:left}
.kvlens.page{min-height:100vh;box-sizing:border-box;padding:2rem max(1rem,calc(50vw - 30rem)) 4rem}
.kvlens *{box-sizing:border-box}
.kvlens h1{font-size:1.6rem;line-height:1.25;margin:0 0 .25rem}
.kvlens h2{font-size:1.15rem;margin:0 0 .25rem;overflow-wrap:anywhere}
.kvlens a{color:inherit;text-underline-offset:.2em}
.kvlens .soft{color:var(--soft);font-size:.875rem}
.kvlens dl{display:grid;grid-template-columns:max-content 1fr;gap:.1rem 1.25rem;margin:1rem 0;font-size:.925rem}
.kvlens dt{color:var(--soft)}
.kvlens dd{margin:0;overflow-wrap:anywhere}
.kvlens .legend{position:sticky;top:0;z-index:1;background:var(--ground);border-bottom:1px solid var(--line);
 padding:.6rem 0 .5rem;margin:0 0 1.5rem;font-size:.8125rem}
.kvlens .bar{display:grid;grid-template-columns:auto minmax(10rem,22rem) auto;gap:0 .75rem;align-items:center;
 justify-content:start}
.kvlens .steps{display:flex;border:1px solid var(--line);border-radius:3px;overflow:hidden;print-color-adjust:exact}
.kvlens .steps span{flex:1;height:1rem}
.kvlens .ticks{grid-column:2;display:flex;justify-content:space-between;font-variant-numeric:tabular-nums}
.kvlens .ticks span{width:0;display:flex;justify-content:center;white-space:nowrap}
.kvlens .ticks span:first-child{justify-content:flex-start}
.kvlens .ticks span:last-child{justify-content:flex-end}
.kvlens .keys{display:flex;flex-wrap:wrap;gap:.1rem 1.25rem;color:var(--soft);margin-top:.35rem}
.kvlens nav ol{columns:18rem;column-gap:2rem;padding-left:1.75rem;margin:.25rem 0 2rem;font-size:.9rem}
.kvlens nav li{break-inside:avoid;overflow-wrap:anywhere}
.kvlens section{border-top:1px solid var(--line);padding:1.25rem 0 1.5rem;scroll-margin-top:6rem}
.kvlens:not(.page) section{border:0;padding:0}
.kvlens .piece{display:grid;grid-template-columns:5.5rem 1fr;margin:.6rem 0 0}
.kvlens .piece>.soft{padding-top:.35rem}
.kvlens .tokens{white-space:pre-wrap;overflow-wrap:anywhere;line-height:1.85;font-size:1.0625rem;
 print-color-adjust:exact;forced-color-adjust:none;background:var(--ground);color:var(--ink)}
.kvlens .tokens>span{padding:.12em 0;border-radius:2px;-webkit-box-decoration-break:clone;
 box-decoration-break:clone}
.kvlens .tokens>span:hover{outline:2px solid var(--ink);outline-offset:0}
.kvlens .nl{color:var(--soft);user-select:none}
.kvlens .sink{outline:1.5px dashed var(--soft);outline-offset:-1px}
.kvlens .target .tokens{border-left:3px solid var(--ink);padding-left:.75rem;font-weight:600}
.kvlens table{border-collapse:collapse;font-size:.875rem;margin:.5rem 0 0;width:auto;color:inherit}
.kvlens th,.kvlens td{text-align:left;padding:.2rem .9rem .2rem 0;border-bottom:1px solid var(--line);
 vertical-align:top;background:none;white-space:normal;color:inherit}
.kvlens th{font-weight:600;color:var(--soft);white-space:nowrap}
.kvlens .number{text-align:right;font-variant-numeric:tabular-nums;white-space:nowrap}
.kvlens mark{color:inherit;padding:.1em .15em;border-radius:2px;background:none;outline:1px solid var(--line)}
.kvlens td.context{white-space:pre-wrap;overflow-wrap:anywhere}
.kvlens summary{cursor:pointer;margin-top:.75rem;font-size:.925rem}
.kvlens.page .tokens>span:hover::after{content:attr(title);position:fixed;left:0;right:0;bottom:0;z-index:2;
 background:var(--ink);color:var(--ground);font:600 .9rem/1.4 system-ui,sans-serif;padding:.5rem 1rem;
 white-space:pre-wrap;text-align:center}
@media (max-width:40rem){.kvlens .piece{display:block}.kvlens .legend{position:static}
 .kvlens .bar{grid-template-columns:1fr 1fr}.kvlens .steps,.kvlens .ticks{grid-column:1/-1}
 .kvlens .steps{grid-row:2}.kvlens .steps+span{grid-row:1;grid-column:2;text-align:right}}
@media print{.kvlens .legend{position:static}}
"""
