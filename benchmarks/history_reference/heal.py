"""The same conversation through agentcore-rl-toolkit 0.2.0, for `benchmarks/history.py --reference`.

    python3 -m venv v && v/bin/pip install "agentcore-rl-toolkit[gateway]==0.2.0" transformers==5.12.1
    python benchmarks/history.py --model ./model --reference v/bin/python

Runs in that environment, so it imports nothing of turnfold. Reads one JSON object on standard input
({"model", "tools", "turns": [{"messages", "output_ids", "reply"}]}) and prints the CPU milliseconds
of each turn: linear is heal and commit, tree is render.
"""

import asyncio
import json
import logging
import sys
import time
from typing import Any

logging.disable(logging.WARNING)


async def measure(conversation: dict[str, Any]) -> dict[str, list[float]]:
    from agentcore_rl_toolkit.rollout_gateway import HfTemplateRenderer, LinearHealer
    from transformers import AutoTokenizer

    renderer = HfTemplateRenderer(AutoTokenizer.from_pretrained(conversation["model"]))
    healer = LinearHealer(renderer)
    tools = conversation["tools"]
    linear, tree = [], []
    for turn in conversation["turns"]:
        began = time.process_time()
        prompt_ids = await healer.heal("s", turn["messages"], tools)
        healer.commit(
            "s",
            fed_prompt_ids=prompt_ids,
            output_ids=turn["output_ids"],
            messages=turn["messages"],
            response_message=turn["reply"],
            tools=tools,
        )
        linear.append((time.process_time() - began) * 1e3)
        began = time.process_time()
        await renderer.render(turn["messages"], tools=tools)
        tree.append((time.process_time() - began) * 1e3)
    return {"linear": linear, "tree": tree}


if __name__ == "__main__":
    print(json.dumps(asyncio.run(measure(json.load(sys.stdin)))))
