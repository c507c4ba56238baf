"""Renders the templates of this directory as Hugging Face transformers does.

Needs `transformers==5.24.0` and `Jinja2==3.1.6`. Run it in this directory; it writes the same bytes each time.
"""

import json

from jinja2.exceptions import TemplateError
from transformers.utils.chat_template_utils import render_jinja_template


def message(role, content, **fields):
    return {"role": role, "content": content, **fields}


HELLO = [message("user", "Hello")]
TALK = [message("system", " Be kind. "), message("user", " Hi "), message("assistant", "Hey! "), message("user", "And\nnow?")]
CASES = [
    ("chatml", HELLO, {}),
    ("chatml", TALK, {}),
    ("chatml", TALK, {"add_generation_prompt": False}),
    ("chatml", [message("user", "")], {}),
    ("chatml", [message("user", "  spaces \n\n"), message("assistant", "{{ 7 * 7 }} {% raw %}")], {}),
    ("chatml-generation", TALK, {}),
    ("turns", HELLO, {}),
    ("turns", TALK, {}),
    ("turns", [message("user", "a"), message("user", "b")], {}),
    ("turns", [message("assistant", "a")], {}),
    ("no-system", HELLO, {}),
    ("no-system", TALK, {}),
    ("no-system", TALK[1:], {}),
    ("features", HELLO, {}),
    (
        "features",
        [
            message("system", "a banana"),
            message("user", "first", name="Ann"),
            message("assistant", "<think>\nhm\n</think>\n\nanswer"),
            message("user", "/skip this one   "),
        ],
        {
            "enable_thinking": True,
            "settings": {"zeta": 1, "alpha": ["<b>", "it's & \"so\""], "flag": None, "text": "line\nbreak \\ / é 语", "on": True, "nested": {"b": 0.5}},
        },
    ),
]

results = []
for template, messages, kwargs in CASES:
    with open(f"{template}.jinja", encoding="utf-8") as file:
        source = file.read()
    variables = {"bos_token": "<s>", "eos_token": "</s>", "add_generation_prompt": True, **kwargs}
    case = {"template": template, "messages": messages, "kwargs": kwargs}
    try:
        rendered, _ = render_jinja_template([messages], chat_template=source, **variables)
        case["rendered"] = rendered[0]
    except TemplateError as error:
        case["refused"] = str(error)
    results.append(case)
with open("cases.json", "w", encoding="utf-8") as file:
    file.write(json.dumps(results, ensure_ascii=False, indent=1) + "\n")
