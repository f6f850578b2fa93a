"""Chat templates in the manner of well-known models, and folders that have them."""

import json
import pathlib

from tests.support.llm_tokenizers import MARKS, byte_tokenizer

LLAMA3 = """\
{{- bos_token }}
{%- for message in messages %}
    {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n' }}
    {{- message['content'] | trim + '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}
{%- endif %}
"""

# A system turn becomes the beginning of the user's first; another one later is refused.
GEMMA = """\
{{ bos_token }}
{%- set said = '' %}
{%- set turns = messages %}
{%- if messages[0].role == 'system' %}
    {%- set said = messages[0].content | trim + '\n\n' %}
    {%- set turns = messages[1:] %}
{%- endif %}
{%- for turn in turns %}
    {%- if (turn.role == 'user') != (loop.index0 is even) %}
        {{- raise_exception('user and assistant have to take turns') }}
    {%- endif %}
    {{- '<start_of_turn>' + ('model' if turn.role == 'assistant' else turn.role) }}
{{ (said if loop.first else '') + turn.content | trim + '<end_of_turn>' }}
{% endfor %}
{%- if add_generation_prompt %}
<start_of_turn>model
{% endif %}
"""

CHATML = """\
{% for message in messages %}
<|im_start|>{{ message.role }}
{% if message.role == 'assistant' %}
{% generation %}{{ message.content + '<|im_end|>' }}{% endgeneration +%}
{% else %}
{{ message.content + '<|im_end|>' }}
{% endif %}
{% endfor %}
{% if add_generation_prompt %}
<|im_start|>assistant
{% endif %}
"""

TEMPLATES = {"llama3": LLAMA3, "gemma": GEMMA, "chatml": CHATML}
CONFIGS = {
    "llama3": {"bos_token": "<|begin_of_text|>", "eos_token": {"content": "<|eot_id|>"}},
    "gemma": {"bos_token": {"content": "<bos>", "special": True}, "eos_token": "<eos>"},
    "chatml": {"bos_token": None, "eos_token": "<|im_end|>"},
}


def write(folder: pathlib.Path, kind: str, template: str | None = None) -> pathlib.Path:
    """Writes a tokenizer and a template, that of `kind` by default, and returns the folder."""
    byte_tokenizer(MARKS[kind]).save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(CONFIGS[kind]))
    (folder / "chat_template.jinja").write_text(template or TEMPLATES[kind])
    return folder
