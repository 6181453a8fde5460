"""The server as its own process, spoken to over HTTP."""

import asyncio
import json
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from safetensors.torch import load_file, save_file

from turnfold.embedded.inference.server.serve import ServerSettings, StartupError, serve
from turnfold.embedded.inference.testing import ServerProcess, inference_server

TIMEOUT_S = 60.0
VOCAB_SIZE = 370
MAX_LEN = 800
GENERATE = "/inference/v1/generate"


@pytest.fixture(scope="module")
def server(model_dir: Path) -> Iterator[ServerProcess]:
    options = ["--slots", "4", "--max-len", str(MAX_LEN), "--served-model-name", "tiny"]
    with inference_server(model_dir, *options) as server:
        yield server


@pytest.fixture
async def client(server: ServerProcess) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=server.base_url, timeout=TIMEOUT_S) as client:
        yield client
        # Leave the shared server running, idle and under its first label for the next test.
        await client.post("/abort_requests", json={})
        await client.post("/resume")
        await client.post("/update_weight_version", json={"new_version": "0"})


def body(prompt: list[int] | None = None, **sampling: Any) -> dict[str, Any]:
    return {"token_ids": prompt or [1, 2, 3], "sampling_params": sampling}


async def generate(client: httpx.AsyncClient, **sampling: Any) -> dict[str, Any]:
    response = await client.post(GENERATE, json=body(**sampling))
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


async def metric(client: httpx.AsyncClient, name: str) -> float:
    lines = (await client.get("/metrics")).text.splitlines()
    return next(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(name + " "))


async def wait_for(condition: Callable[[], Awaitable[bool]]) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while not await condition():
        assert time.monotonic() < deadline, "the condition never came true"
        await asyncio.sleep(0.02)


async def is_running(client: httpx.AsyncClient, count: int) -> bool:
    return await metric(client, "vllm:num_requests_running") == count


async def test_a_response_has_tokens_logprobs_versions_and_usage(client: httpx.AsyncClient) -> None:
    answer = await generate(client, max_tokens=5, logprobs=1, seed=0)
    [choice] = answer["choices"]
    assert answer["request_id"].startswith("generate-tokens-")
    assert (answer["model"], answer["output_mode"]) == ("tiny", "tokens")
    assert (choice["index"], choice["finish_reason"], choice["stop_reason"]) == (0, "length", None)
    assert choice["weight_versions"] == [{"version": "0", "start": 0, "end": 5}]
    entries = choice["logprobs"]["content"]
    assert [entry["token_id"] for entry in entries] == choice["token_ids"]
    assert all(entry["logprob"] <= 0 and entry["rank"] >= 1 for entry in entries)
    assert all(len(entry["top_logprobs"]) == 1 for entry in entries)
    assert answer["usage"]["prompt_tokens"] == 3
    assert answer["usage"]["completion_tokens"] == 5
    assert answer["usage"]["total_tokens"] == 8


async def test_logprobs_come_only_when_asked_for(client: httpx.AsyncClient) -> None:
    [choice] = (await generate(client, max_tokens=2))["choices"]
    assert choice["logprobs"] is None
    [choice] = (await generate(client, max_tokens=2, logprobs=0))["choices"]
    assert [entry["top_logprobs"] for entry in choice["logprobs"]["content"]] == [[], []]


async def test_a_seed_gives_the_same_tokens_again(client: httpx.AsyncClient) -> None:
    first = await generate(client, max_tokens=20, seed=5)
    second = await generate(client, max_tokens=20, seed=5)
    assert first["choices"][0]["token_ids"] == second["choices"][0]["token_ids"]


async def test_max_tokens_is_clamped_to_the_context(client: httpx.AsyncClient) -> None:
    prompt = [1] * (MAX_LEN - 3)
    response = await client.post(GENERATE, json=body(prompt, max_tokens=10_000, ignore_eos=True))
    [choice] = response.json()["choices"]
    assert (len(choice["token_ids"]), choice["finish_reason"]) == (3, "length")


async def test_a_stop_string_is_the_stop_reason(client: httpx.AsyncClient, model_dir: Path) -> None:
    from transformers import PreTrainedTokenizerFast

    tokenizer: Any = PreTrainedTokenizerFast.from_pretrained(model_dir)
    greedy = (await generate(client, max_tokens=30, temperature=0, ignore_eos=True))["choices"][0]
    letters = (tokenizer.decode([t], skip_special_tokens=True) for t in greedy["token_ids"])
    stop = next(text for text in letters if text and text.isascii())
    stopped = await generate(client, max_tokens=30, temperature=0, ignore_eos=True, stop=stop)
    [choice] = stopped["choices"]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", stop)
    assert stop in tokenizer.decode(choice["token_ids"])
    assert choice["token_ids"] == greedy["token_ids"][: len(choice["token_ids"])]


async def test_the_prompt_is_returned_on_request(client: httpx.AsyncClient) -> None:
    request = {**body(max_tokens=1), "return_token_ids": True}
    response = await client.post(GENERATE, json=request)
    assert response.json()["prompt_token_ids"] == [1, 2, 3]


async def test_the_request_id_header_beats_the_body(client: httpx.AsyncClient) -> None:
    request = {**body(max_tokens=1), "request_id": "from-body"}
    by_body = await client.post(GENERATE, json=request)
    by_header = await client.post(GENERATE, json=request, headers={"X-Request-Id": "from-header"})
    assert by_body.json()["request_id"] == "generate-tokens-from-body"
    assert by_header.json()["request_id"] == "generate-tokens-from-header"


async def test_a_stream_carries_what_the_plain_response_does(client: httpx.AsyncClient) -> None:
    plain = await generate(client, max_tokens=8, seed=1, logprobs=0)
    request = {
        **body(max_tokens=8, seed=1, logprobs=0),
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    response = await client.post(GENERATE, json=request)
    assert response.headers["content-type"].startswith("text/event-stream")
    events = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line]
    assert events[-1] == "[DONE]"
    *deltas, usage = [json.loads(event) for event in events[:-1]]
    choices = [delta["choices"][0] for delta in deltas]
    [expected] = plain["choices"]
    assert [choice["token_ids"] for choice in choices] == [[t] for t in expected["token_ids"]]
    assert [c["logprobs"]["content"][0]["token_id"] for c in choices] == expected["token_ids"]
    assert [choice["finish_reason"] for choice in choices] == [None] * 7 + ["length"]
    assert [choice["weight_versions"] for choice in choices[:-1]] == [None] * 7
    assert choices[-1]["weight_versions"] == expected["weight_versions"]
    assert (usage["choices"], usage["usage"]["completion_tokens"]) == ([], 8)


@pytest.mark.parametrize(
    ("request_body", "status", "complaint"),
    [
        ({"token_ids": []}, 400, "token_ids is empty"),
        ({"token_ids": [1, VOCAB_SIZE]}, 400, "Token id 370 is out of vocabulary"),
        ({"token_ids": [-1]}, 400, "Token id -1 is out of vocabulary"),
        ({"token_ids": [1] * MAX_LEN}, 400, "context of 800 tokens"),
        ({"token_ids": "text"}, 400, "Expected `array`, got `str`"),
        ({"sampling_params": {}}, 400, "missing required field `token_ids`"),
        ({**body(), "model": "another"}, 404, "The model `another` does not exist"),
        ({**body(), "output_mode": "text"}, 400, "output_mode"),
        (body(max_tokens=0), 400, "max_tokens"),
        (body(temperature=-1), 400, "temperature"),
        (body(top_p=0), 400, "top_p"),
        (body(top_k=-2), 400, "top_k"),
        (body(logprobs=21), 400, "logprobs"),
        (body(stop=[""]), 400, "stop"),
        (body(n=2), 400, "n=2 is not supported"),
        (body(min_p=0.1), 400, "min_p=0.1 is not supported"),
        (body(repetition_penalty=1.2), 400, "repetition_penalty=1.2 is not supported"),
        (body(max_new_tokens=5), 400, "unknown field `max_new_tokens`"),
    ],
)
async def test_a_bad_request_is_answered_with_an_error_object(
    client: httpx.AsyncClient, request_body: dict[str, Any], status: int, complaint: str
) -> None:
    response = await client.post(GENERATE, json=request_body)
    error = response.json()["error"]
    assert response.status_code == error["code"] == status
    assert error["type"] == ("NotFoundError" if status == 404 else "BadRequestError")
    assert complaint in error["message"]
    assert "param" in error


@pytest.mark.parametrize(
    ("method", "path", "content", "status", "complaint"),
    [
        ("POST", GENERATE, "{not json", 400, "malformed"),
        ("GET", GENERATE, "", 405, "Method Not Allowed"),
        ("GET", "/nowhere", "", 404, "/nowhere"),
        ("POST", "/pause?mode=sometimes", "", 400, "'sometimes', expected one of abort, wait"),
        ("POST", "/inference/v1/abort_requests", "{}", 400, "request_ids"),
        ("POST", "/collective_rpc", '{"method": "sleep"}', 400, "expected 'reload_weights'"),
        ("POST", "/update_weight_version", "{}", 400, "new_version"),
    ],
)
async def test_every_endpoint_has_the_same_error_object(
    client: httpx.AsyncClient,
    method: str,
    path: str,
    content: str,
    status: int,
    complaint: str,
) -> None:
    response = await client.request(method, path, content=content)
    error = response.json()["error"]
    assert response.status_code == error["code"] == status
    assert complaint in error["message"]


async def test_parameters_that_ask_for_nothing_are_accepted(client: httpx.AsyncClient) -> None:
    neutral = {
        "n": 1,
        "min_p": 0,
        "presence_penalty": 0,
        "repetition_penalty": 1.0,
        "min_tokens": 0,
    }
    await generate(client, max_tokens=1, top_k=-1, skip_special_tokens=False, **neutral)
    await generate(client, max_tokens=1, logit_bias=None, structured_outputs=None)


async def test_an_abort_needs_the_prefixed_id_and_returns_the_partial_output(
    client: httpx.AsyncClient,
) -> None:
    request = {**body(ignore_eos=True), "request_id": "mine"}
    running = asyncio.create_task(client.post(GENERATE, json=request))
    await wait_for(lambda: is_running(client, 1))
    for request_id in ("mine", "generate-tokens-mine"):
        assert not running.done()
        ids = {"request_ids": [request_id]}
        assert (await client.post("/inference/v1/abort_requests", json=ids)).status_code == 200
    [choice] = (await running).json()["choices"]
    assert choice["finish_reason"] == "abort"
    assert 1 <= len(choice["token_ids"]) < MAX_LEN - 3
    assert choice["weight_versions"][-1]["end"] == len(choice["token_ids"])


@pytest.mark.parametrize("is_stream", [False, True])
async def test_a_client_that_leaves_frees_its_slot(
    client: httpx.AsyncClient, server: ServerProcess, is_stream: bool
) -> None:
    # Paused, so that the request cannot end by itself before the client is gone.
    await client.post("/pause?mode=keep")
    waiting = asyncio.create_task(
        client.post(GENERATE, json={**body(), "stream": is_stream}, timeout=TIMEOUT_S)
    )

    async def num_waiting() -> float:
        return await metric(client, "vllm:num_requests_waiting")

    async def has_arrived() -> bool:
        return await num_waiting() == 1

    async def has_gone() -> bool:
        return await num_waiting() == 0

    await wait_for(has_arrived)
    waiting.cancel()
    await wait_for(has_gone)


async def test_weights_are_swapped_under_a_running_request(
    client: httpx.AsyncClient, model_dir: Path, other_model_dir: Path
) -> None:
    running = asyncio.create_task(
        client.post(GENERATE, json=body(ignore_eos=True, logprobs=0, seed=0))
    )
    await wait_for(lambda: is_running(client, 1))
    await client.post("/pause?mode=keep&clear_cache=true")
    assert (await client.get("/is_paused")).json() == {"is_paused": True}
    reloaded = await reload(client, other_model_dir)
    assert (reloaded.status_code, reloaded.json()) == (200, {"results": [None]})
    await client.post("/update_weight_version", json={"new_version": "1"})
    assert (await client.get("/weight_info")).json() == {"weight_version": "1"}
    await client.post("/resume")
    [choice] = (await running).json()["choices"]
    old, new = choice["weight_versions"]
    assert (old["version"], old["start"], new["version"]) == ("0", 0, "1")
    assert old["end"] == new["start"] < new["end"] == len(choice["token_ids"])
    # Without a path the server's own directory is read again.
    assert (await reload(client, None)).status_code == 200


async def reload(client: httpx.AsyncClient, weights_path: Path | None) -> httpx.Response:
    kwargs = {} if weights_path is None else {"weights_path": str(weights_path)}
    return await client.post("/collective_rpc", json={"method": "reload_weights", "kwargs": kwargs})


async def test_a_failed_reload_says_why_and_leaves_the_old_weights_serving(
    client: httpx.AsyncClient, model_dir: Path, tmp_path: Path
) -> None:
    before = await generate(client, max_tokens=20, seed=3)
    weights = load_file(model_dir / "model.safetensors")
    weights["model.norm.weight"][0] = torch.inf
    save_file(weights, tmp_path / "model.safetensors")
    for directory, complaint in [
        (tmp_path, "model.norm.weight has values that are not finite"),
        (tmp_path / "nowhere", "does not exist"),
    ]:
        response = await reload(client, directory)
        assert response.status_code == 400
        assert complaint in response.json()["error"]["message"]
    after = await generate(client, max_tokens=20, seed=3)
    assert after["choices"][0]["token_ids"] == before["choices"][0]["token_ids"]


async def test_pause_by_wait_answers_when_what_ran_is_done(client: httpx.AsyncClient) -> None:
    running = asyncio.create_task(client.post(GENERATE, json=body(ignore_eos=True)))
    await wait_for(lambda: is_running(client, 1))
    assert (await client.post("/pause?mode=wait")).json() == {"status": "paused"}
    assert await is_running(client, 0)
    assert (await running).json()["choices"][0]["finish_reason"] == "length"
    held_back = asyncio.create_task(generate(client, max_tokens=1))
    assert (await client.post("/resume")).json() == {"status": "resumed"}
    assert len((await held_back)["choices"][0]["token_ids"]) == 1


async def test_abort_all_reports_how_many(client: httpx.AsyncClient) -> None:
    await client.post("/pause?mode=keep")
    tasks = [asyncio.create_task(client.post(GENERATE, json=body())) for _ in range(3)]

    async def all_waiting() -> bool:
        return await metric(client, "vllm:num_requests_waiting") == 3

    await wait_for(all_waiting)
    answer = await client.post("/abort_requests", json={})
    assert answer.json() == {"status": "aborted", "aborted": 3}
    for task in tasks:
        assert (await task).json()["choices"][0]["finish_reason"] == "abort"


async def test_the_server_describes_itself(client: httpx.AsyncClient, model_dir: Path) -> None:
    assert (await client.get("/health")).status_code == 200
    assert set((await client.get("/version")).json()) == {"version"}
    [card] = (await client.get("/v1/models")).json()["data"]
    assert (card["id"], card["max_model_len"]) == ("tiny", MAX_LEN)
    assert card["root"] == str(model_dir)
    assert (await client.post("/reset_prefix_cache")).json() == {"success": True}


async def test_metrics_count_tokens_and_endings(client: httpx.AsyncClient) -> None:
    stops = 'vllm:request_success_total{finished_reason="length"}'
    before = [await metric(client, n) for n in ("vllm:generation_tokens_total", stops)]
    await generate(client, max_tokens=4, ignore_eos=True)
    after = [await metric(client, n) for n in ("vllm:generation_tokens_total", stops)]
    assert [b - a for a, b in zip(before, after, strict=True)] == [4, 1]


async def test_many_clients_share_few_slots(client: httpx.AsyncClient) -> None:
    answers = await asyncio.gather(*(generate(client, max_tokens=10, seed=i) for i in range(24)))
    assert all(answer["choices"][0]["token_ids"] for answer in answers)


def test_a_server_starts_on_the_version_of_its_weights_and_stops_cleanly(
    model_dir: Path, tmp_path: Path
) -> None:
    published = tmp_path / "published"
    shutil.copytree(model_dir, published)
    (published / "turnfold.json").write_text('{"policy_version": 3}')
    with inference_server(published) as server:
        version = httpx.get(server.base_url + "/weight_info").json()
        assert version == {"weight_version": "3"}
        assert server.stop() == 0


def test_a_missing_model_is_one_clear_line(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "turnfold.embedded.inference", "--model", str(tmp_path)]
    ended = subprocess.run(
        [*command, "--port", "0"], capture_output=True, text=True, timeout=TIMEOUT_S, check=False
    )
    assert ended.returncode == 1
    [line] = ended.stderr.strip().splitlines()
    assert f"{tmp_path} holds no model (no config.json)" in line


def test_a_taken_port_is_named(model_dir: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(StartupError, match=f"port {port} on 127.0.0.1 is taken"):
            serve(ServerSettings(model_dir=model_dir, port=port))


def test_a_model_that_cannot_be_loaded_is_named_in_one_line(
    model_dir: Path, tmp_path: Path
) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(model_dir, broken)
    (broken / "model.safetensors").write_bytes(b"cut short")
    with pytest.raises(StartupError, match=r"cannot load the model in .*broken: ") as caught:
        serve(ServerSettings(model_dir=broken))
    assert "\n" not in str(caught.value)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is such a device here")
def test_a_device_that_is_not_there_is_named(model_dir: Path) -> None:
    with pytest.raises(StartupError, match="device cuda is not available; use --device cpu"):
        serve(ServerSettings(model_dir=model_dir, device="cuda"))
