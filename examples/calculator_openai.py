"""A calculator agent on the `openai` SDK: the model may call a tool, and then has to answer.

    turnfold worker --agent examples/calculator_openai.py:run

The task is a row of examples/sums.jsonl: {"question": "What is 12 * 7?", "answer": 84}.
"""

from __future__ import annotations

import ast
import json
import operator
import re
from collections.abc import Mapping
from typing import Any

from openai import AsyncOpenAI

MAX_TURNS = 4

TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {
            "name": "calculate",
            "description": "The value of an arithmetic expression.",
            "parameters": {
                "type": "object",
                "properties": {"expression": {"type": "string"}},
                "required": ["expression"],
            },
        },
    }
]


async def run(task: Mapping[str, Any], rollout: Any) -> dict[str, float]:
    """Ask, calculate as often as the model wants, and score in named parts."""
    messages: list[Any] = [{"role": "user", "content": task["question"]}]
    num_calls, answer = 0, ""
    async with AsyncOpenAI(
        base_url=rollout.base_url, api_key=rollout.api_key, max_retries=8
    ) as client:
        for _ in range(MAX_TURNS):
            completion = await client.chat.completions.create(
                model="policy", messages=messages, tools=TOOLS, max_tokens=256
            )
            message = completion.choices[0].message
            messages.append(message.model_dump(exclude_none=True))
            answer = message.content or ""
            if not message.tool_calls:
                break
            for call in message.tool_calls:
                num_calls += 1
                result = calculate(call.function.arguments)
                messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    return score(task, num_calls, answer)


def score(task: Mapping[str, Any], num_calls: int, answer: str) -> dict[str, float]:
    """0.2 for using the tool, 0.8 when the last number of the answer is right."""
    numbers = re.findall(r"-?\d+(?:\.\d+)?", answer)
    is_right = bool(numbers) and float(numbers[-1]) == float(task["answer"])
    return {"tool": 0.2 * (num_calls > 0), "answer": 0.8 * is_right}


def calculate(arguments: str) -> str:
    """The tool. What the model wrote may be anything: it is told what is wrong with it."""
    try:
        expression = str(json.loads(arguments)["expression"])
        return f"{value(ast.parse(expression, mode='eval').body):.12g}"
    except (ValueError, TypeError, KeyError, SyntaxError, ZeroDivisionError) as error:
        return f"error: {error}"


OPERATORS: dict[type[ast.operator], Any] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}


def value(node: ast.expr) -> float:
    """Numbers and + - * / only: never hand a model's text to eval()."""
    match node:
        case ast.Constant(value=int() | float() as number):
            return number
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -value(operand)
        case ast.BinOp(left=left, op=op, right=right) if type(op) in OPERATORS:
            return float(OPERATORS[type(op)](value(left), value(right)))
    raise ValueError(f"expected numbers and + - * /, got {ast.unparse(node)}")
