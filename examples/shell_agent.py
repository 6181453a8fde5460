"""A shell agent as a program of its own: nothing of turnfold is imported.

    turnfold worker --command "python examples/shell_agent.py"

The task comes in $TURNFOLD_TASK, a row of examples/files.jsonl:

    {"question": "How many lines does notes.txt have?", "files": {"notes.txt": "…"}, "answer": "3"}

The openai SDK finds $OPENAI_BASE_URL and $OPENAI_API_KEY by itself; the reward is the last line
that is printed. The model's commands run in a directory that is thrown away, under a time limit,
and with this program's rights: run it in a container when the model is not a toy.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import tempfile
from pathlib import Path
from typing import Any

from openai import OpenAI

MAX_TURNS = 5
MAX_OUTPUT_CHARS = 2000

TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {
            "name": "shell",
            "description": "Runs a shell command in the directory of the files.",
            "parameters": {
                "type": "object",
                "properties": {"command": {"type": "string"}},
                "required": ["command"],
            },
        },
    }
]


def main() -> None:
    """Work on one task and print its reward."""
    task = json.loads(os.environ["TURNFOLD_TASK"])
    with tempfile.TemporaryDirectory() as directory:
        for name, text in task["files"].items():
            (Path(directory) / name).write_text(text)
        answer = converse(task["question"], directory)
    print(json.dumps({"reward": float(task["answer"] in re.findall(r"\w+", answer))}))


def converse(question: str, directory: str) -> str:
    """The model's last message."""
    client = OpenAI(max_retries=8)
    messages: list[Any] = [{"role": "user", "content": question}]
    for _ in range(MAX_TURNS):
        completion = client.chat.completions.create(
            model="policy", messages=messages, tools=TOOLS, max_tokens=256
        )
        message = completion.choices[0].message
        messages.append(message.model_dump(exclude_none=True))
        if not message.tool_calls:
            return message.content or ""
        for call in message.tool_calls:
            output = shell(call.function.arguments, directory)
            messages.append({"role": "tool", "tool_call_id": call.id, "content": output})
    return ""


def shell(arguments: str, directory: str) -> str:
    """The tool: what the command wrote, shortened."""
    try:
        done = subprocess.run(
            ["sh", "-c", str(json.loads(arguments)["command"])],
            cwd=directory,
            # The model's commands get no key.
            env={"PATH": os.environ["PATH"]},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=10,
            text=True,
            errors="replace",
            check=False,
        )
    except (ValueError, TypeError, KeyError) as error:
        return f"error: {error}"
    except subprocess.TimeoutExpired:
        return "error: the command took longer than 10 s"
    return done.stdout[:MAX_OUTPUT_CHARS] or f"(no output, exit code {done.returncode})"


if __name__ == "__main__":
    main()
