"""Markdown and HTML that tries to run something, fetch something or change the page. Used by the tests of the page."""

from __future__ import annotations

HTML = (
    "<script>window.pwned=1</script>",
    "<img src=x onerror=window.pwned=1>",
    "<svg onload=window.pwned=1>",
    "<svg><script>window.pwned=1</script></svg>",
    "<svg><a xlink:href=javascript:window.pwned=1><text>x</text></a></svg>",
    "<math><mtext><table><mglyph><style><img src=x onerror=window.pwned=1></style></mglyph></table></mtext></math>",
    "<iframe src=javascript:window.pwned=1></iframe>",
    "<iframe srcdoc='<script>parent.pwned=1</script>'></iframe>",
    "<object data=javascript:window.pwned=1></object>",
    "<embed src=javascript:window.pwned=1>",
    "<body onload=window.pwned=1>",
    "<details open ontoggle=window.pwned=1>x</details>",
    "<video><source onerror=window.pwned=1></video>",
    "<input autofocus onfocus=window.pwned=1>",
    "<form action=javascript:window.pwned=1><button>x</button></form>",
    "<form id=key><input name=attributes></form>",
    "<a id=state href=//evil.example>x</a>",
    "<meta http-equiv=refresh content='0;url=//evil.example'>",
    "<base href=//evil.example>",
    "<link rel=stylesheet href=//evil.example/x.css>",
    "<style>@import '//evil.example/x.css';*{display:none}</style>",
    "<p style='position:fixed;inset:0;background:url(//evil.example)'>x</p>",
    "<template><script>window.pwned=1</script></template>",
    "<noscript><p title='</noscript><img src=x onerror=window.pwned=1>'></noscript>",
    "<textarea></textarea><img src=x onerror=window.pwned=1>",
    "<!--><img src=x onerror=window.pwned=1>-->",
    "<![CDATA[<img src=x onerror=window.pwned=1>]]>",
    "<scr<script>ipt>window.pwned=1</scr</script>ipt>",
    "<IMG SRC=x ONERROR=window.pwned=1>",
    "<img/src=x/onerror=window.pwned=1>",
    "<img src=//evil.example/track.png>",
    "<audio src=//evil.example/a.mp3 autoplay></audio>",
    "<marquee onstart=window.pwned=1>x</marquee>",
    "<x-y onclick=window.pwned=1 class=main data-copy=x>x</x-y>",
    "<select onfocus=window.pwned=1 autofocus></select>",
    "&lt;img src=x onerror=window.pwned=1&gt;",
)
ADDRESSES = (
    "javascript:window.pwned=1",
    "JaVaScRiPt:window.pwned=1",
    "java\tscript:window.pwned=1",
    "&#106;avascript:window.pwned=1",
    "javascript&colon;window.pwned=1",
    "%6Aavascript:window.pwned=1",
    "data:text/html,<script>parent.pwned=1</script>",
    "data:image/svg+xml,<svg onload=window.pwned=1>",
    "vbscript:window.pwned=1",
    "blob:http://127.0.0.1/x",
    "file:///etc/passwd",
    "//evil.example/x",
    "\x01javascript:window.pwned=1",
    "feed:javascript:window.pwned=1",
    "x' onmouseover='window.pwned=1",
    'x" onmouseover="window.pwned=1',
)
AROUND_HTML = ("{}", "text **{}** text", "- item\n\n  {}", "| a |\n|---|\n| {} |", "> {}\n\n# {}")
AROUND_ADDRESS = ("[click]({})", "![seen]({})", "<{}>", "[click][1]\n\n[1]: {}")

# What a reader of Markdown may need minutes or its whole stack for.
SLOW = (
    "_a_b" * 20_000,
    "a**b" * 20_000 + "c* " * 20_000,
    "a" + " " * 20_000 + "b",
    ">" * 3000 + " x",
    "[a](" * 20_000,
    "`".join("`" * length for length in range(300)),
)

SNIPPETS = (
    *(around.replace("{}", html) for html in HTML for around in AROUND_HTML),
    *(around.replace("{}", address) for address in ADDRESSES for around in AROUND_ADDRESS),
    "```html' onload='window.pwned=1\n<script>window.pwned=1</script>\n```",
    '```"><img/src=x/onerror=window.pwned=1>\ncode\n```',
    "`<img src=x onerror=window.pwned=1>`",
    "[x](https://ok.example '\"><img src=x onerror=window.pwned=1>')",
    "[<img src=x onerror=window.pwned=1>](https://ok.example)",
    "- [x] <img src=x onerror=window.pwned=1>",
    "~~<svg onload=window.pwned=1>~~",
    "\\<script>window.pwned=1\\</script>",
)
