"""`turnfold inference`: serve a model over vLLM's token-in, token-out HTTP API."""

from pathlib import Path
from typing import Annotated

import typer


def inference(
    model: Annotated[
        Path, typer.Option(help="Directory with config.json and safetensors weights.")
    ],
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen on; 0 takes a free one.")] = 8000,
    served_model_name: Annotated[
        str | None, typer.Option(help="Name of the model in the API; the directory by default.")
    ] = None,
    slots: Annotated[
        int, typer.Option(min=1, help="Requests that generate at the same time.")
    ] = 32,
    max_len: Annotated[int, typer.Option(min=2, help="Context: prompt and output tokens.")] = 2048,
    device: Annotated[str, typer.Option(help="cpu, cuda or cuda:1.")] = "cpu",
    dtype: Annotated[str, typer.Option(help="float32 or bfloat16.")] = "float32",
    threads: Annotated[int, typer.Option(min=1, help="CPU threads of the model.")] = 1,
    ready_file: Annotated[
        Path | None,
        typer.Option(help="Written when requests are served: base_url and pid as JSON."),
    ] = None,
) -> None:
    """Serve a model with the HTTP API that vLLM has for token ids, for laptops and tests.

    Start it on the tiny model, and ask for ten tokens:

        turnfold tiny-model --out /tmp/tiny
        turnfold inference --model /tmp/tiny --port 8000
        curl localhost:8000/inference/v1/generate -H 'content-type: application/json' \\
            -d '{"token_ids": [1, 5, 9], "sampling_params": {"max_tokens": 10, "logprobs": 0}}'

    Weights are replaced while it runs: POST /pause?mode=keep, /collective_rpc with reload_weights,
    /update_weight_version, /resume. For models beyond a few hundred million weights use vLLM
    itself.
    """
    from turnfold.embedded.inference.server.serve import ServerSettings, serve

    if dtype not in ("float32", "bfloat16"):
        raise typer.BadParameter(f"{dtype} is not float32 or bfloat16", param_hint="--dtype")
    settings = ServerSettings(
        model_dir=model,
        served_model_name=served_model_name,
        host=host,
        port=port,
        num_slots=slots,
        max_len=max_len,
        device=device,
        dtype=dtype,
        num_threads=threads,
        ready_file=ready_file,
    )
    serve(settings)
