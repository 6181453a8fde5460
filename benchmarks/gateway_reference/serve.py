"""The gateway of agentcore-rl-toolkit 0.2.0, for `benchmarks/gateway.py --reference`.

    python3 -m venv v
    v/bin/pip install "agentcore-rl-toolkit[gateway]==0.2.0" transformers==5.12.1
    python benchmarks/gateway.py --model ./model --reference v/bin/python

Runs in that environment, so it imports nothing of turnfold. Serves on a free port, in front of an
engine with vLLM's API, and prints the port. It answers `POST /start/{session}` besides, as the
gateway itself has no HTTP for that.
"""

import argparse
import asyncio
import logging

from agentcore_rl_toolkit.rollout_gateway import HfTemplateRenderer
from agentcore_rl_toolkit.rollout_gateway.gateway import RolloutGateway
from agentcore_rl_toolkit.rollout_gateway.sampling_backends.vllm_http import VllmHttpBackend
from aiohttp import web
from transformers import AutoTokenizer

logging.disable(logging.WARNING)


async def serve(model: str, engine: str, mode: str) -> None:
    tokenizer = AutoTokenizer.from_pretrained(model)
    gateway = RolloutGateway(
        backend=VllmHttpBackend(engine),
        renderer=HfTemplateRenderer(tokenizer),
        tokenizer=tokenizer,
        history_mode=mode,
    )

    async def start(request: web.Request) -> web.Response:
        gateway.create_session(request.match_info["session"])
        return web.json_response({})

    gateway.app.router.add_post("/start/{session}", start)
    runner = web.AppRunner(gateway.app, access_log=None)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    host, port = runner.addresses[0]
    print(f"http://{host}:{port}", flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True)
    parser.add_argument("--engine", required=True)
    parser.add_argument("--mode", choices=("linear", "tree"), required=True)
    given = parser.parse_args()
    asyncio.run(serve(given.model, given.engine, given.mode))
