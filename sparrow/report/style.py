"""The look of the page: the colour scale of tokens and the style sheet."""

from sparrow.report import theme

# Closer together towards 1, as acceptance is skewed.
LEVELS = (0.999, 0.99, 0.97, 0.9, 0.8, 0.6, 0.3, 0.0)
"""Lower ends of the acceptance ranges that tokens are coloured by: one hue, ever further from the background."""

LEVEL_COLORS = ("#ffffff", "#fff3e4", "#ffe2c2", "#fdc791", "#f7a35c", "#e67a2e", "#b4490a", "#742a02")
LEVEL_INKS = (*["#1f2328"] * 6, *["#ffffff"] * 2)


def style_sheet() -> str:
    """CSS of the page."""
    colors = {"ink": theme.INK, "muted": theme.MUTED, "line": theme.GRID, "page": theme.PAGE, "card": theme.CARD}
    colors |= {"below": theme.BELOW, "above": theme.ABOVE}
    variables = " ".join(f"--{name}: {color};" for name, color in colors.items())
    levels = "".join(
        f".a{i} {{ background: {color}; color: {ink}; }}\n"
        for i, (color, ink) in enumerate(zip(LEVEL_COLORS, LEVEL_INKS, strict=True))
    )
    return f":root {{ {variables} }}\n{_LAYOUT}{levels}"


_LAYOUT = """
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 2.25rem 1.25rem 4rem; max-width: 86rem; background: var(--page); color: var(--ink);
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif; }
header p { margin: 0; color: var(--muted); }
h1 { margin: 0 0 1.25rem; font-size: 1.9rem; line-height: 1.2; overflow-wrap: anywhere; }
h2 { margin: 0 0 .6rem; font-size: 1.05rem; }
h3 { margin: 0; font-size: .95rem; overflow-wrap: anywhere; }
.cards { display: grid; grid-template-columns: repeat(2, minmax(0, 1fr)); gap: 1.1rem; margin-bottom: 1.1rem; }
.card { margin: 0; padding: 1rem 1.15rem; background: var(--card); border: 1px solid var(--line); border-radius: 10px;
  overflow-x: auto; }
.wide { grid-column: 1 / -1; }
@media (max-width: 60rem) { .cards { grid-template-columns: minmax(0, 1fr); } }
table { width: 100%; border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { padding: .32rem .6rem .32rem 0; text-align: left; vertical-align: top; border-top: 1px solid var(--line); }
tr:first-child > * { border-top: 0; }
th { font-weight: 400; color: var(--muted); white-space: nowrap; }
#run th { padding-right: 1.5rem; }
#tail th[scope=col], #tail td { text-align: right; white-space: nowrap; }
#tail th[scope=col]:first-child { text-align: left; }
#tail tr > :last-child { padding-right: 0; }
.holds { color: var(--above); } .below { color: var(--below); font-weight: 600; } .undecided { color: var(--muted); }
figure img { display: block; width: 100%; height: auto; }
.wide img { min-width: 46rem; }
figcaption { margin-top: .5rem; color: var(--muted); font-size: .87rem; max-width: 75rem; }
summary { cursor: pointer; }
.legend { display: flex; flex-wrap: wrap; gap: .3rem; margin: .5rem 0 1rem; }
.legend span { padding: .05rem .55rem; border: 1px solid var(--line); border-radius: 4px; font-size: .82rem; }
.note, .facts, .prompt { color: var(--muted); }
.note { margin: .4rem 0 0; font-size: .87rem; }
.step { margin-top: .7rem; }
.step > summary { font-weight: 600; }
article { margin-top: .8rem; padding: .9rem 1rem; border: 1px solid var(--line); border-radius: 8px; }
.facts { margin: .1rem 0 .4rem; font-size: .87rem; }
.facts span:not(:last-child)::after { content: " · "; }
article summary { color: var(--muted); font-size: .87rem; }
.prompt, .tokens { font: 13px/1.65 ui-monospace, SFMono-Regular, Menlo, Consolas, "DejaVu Sans Mono", monospace;
  white-space: pre-wrap; overflow-wrap: anywhere; max-height: 30rem; overflow-y: auto; }
.prompt { margin: .4rem 0; padding-left: .8rem; border-left: 3px solid var(--line); }
.tokens { margin-top: .5rem; }
.tokens span { border-radius: 2px; box-decoration-break: clone; -webkit-box-decoration-break: clone; }
.tokens span:hover { outline: 1px solid var(--ink); }
.tokens .n::before { content: "↵"; opacity: .55; }
.none { outline: 1px dotted var(--muted); }
.gap { display: block; margin: .5rem 0; text-align: center; color: var(--muted); font-style: italic; }
"""
