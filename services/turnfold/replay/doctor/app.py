"""Asks the broker, the services, the disk and the installation."""

from __future__ import annotations

import importlib.util
import shutil
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import msgspec

from turnfold.log.client import BrokerUnavailable, NotLetIn, Reader, topic_differences
from turnfold.log.settings import KafkaSettings
from turnfold.replay.doctor.checks import (
    Check,
    disk_check,
    healer_check,
    model_check,
    packages_check,
    topics_check,
)
from turnfold.schemas.settings import SettingsError
from turnfold.schemas.topics import Topics

_HTTP_TIMEOUT_S = 5.0


async def examine(
    *,
    kafka: KafkaSettings,
    namespace: str,
    gateways: tuple[str, ...] = (),
    engines: tuple[str, ...] = (),
    model: Path | None = None,
    data: Path,
) -> AsyncIterator[Check]:
    """One check after the other, as they come in."""
    yield packages_check([name for name in ("torch", "verl") if not _is_installed(name)])
    yield disk_check(str(data), shutil.disk_usage(_existing(data)).free)
    if model is not None:
        yield model_check(str(model), _file_names(model))
    for check in await _kafka(kafka, namespace):
        yield check
    for url in gateways:
        yield await _answers("gateway", url, "/readyz", "run `turnfold gateway`")
    for url in engines:
        yield await _answers("engine", url, "/health", "run `turnfold inference` or vLLM")


async def _kafka(kafka: KafkaSettings, namespace: str) -> list[Check]:
    topics = Topics(namespace=namespace)
    try:
        async with Reader(kafka, group=f"{namespace}-healer") as reader:
            broker = Check("broker", "ok", f"{kafka.bootstrap}{_let_in(kafka)}")
            differences = await topic_differences(kafka, topics.specs())
            checks = [broker, topics_check(differences)]
            if checks[1].state != "failure":
                checks.append(healer_check(await _behind(reader, topics.events)))
            return checks
    except BrokerUnavailable as error:
        advice = "run `turnfold broker --data ./data`, or set TURNFOLD_BOOTSTRAP"
        return [Check("broker", "failure", str(error).split(": start")[0], advice)]
    except (NotLetIn, SettingsError) as error:
        advice = "see TURNFOLD_KAFKA_… in docs/operations.md"
        return [Check("broker", "failure", str(error), advice)]


def _let_in(kafka: KafkaSettings) -> str:
    """How the broker lets us in: ` over SASL_SSL as ann`; nothing where it lets in everybody."""
    if kafka.kafka_security_protocol == "PLAINTEXT":
        return ""
    user = f" as {kafka.kafka_username}" if kafka.kafka_username else ""
    return f" over {kafka.kafka_security_protocol}{user}"


async def _behind(reader: Reader, topic: str) -> dict[int, int | None]:
    """Events of each partition that the healer has not processed; None where it never committed."""
    found: dict[int, int | None] = {}
    pairs = [(topic, partition) for partition in await reader.partitions(topic)]
    ends = await reader.end_offsets(pairs)
    for pair in pairs:
        committed = await reader.committed(*pair)
        if committed is None:
            found[pair[1]] = None
        else:
            through = int(msgspec.json.decode(committed[1], type=dict[str, float])["through"])
            found[pair[1]] = max(0, ends[pair] - through)
    return found


async def _answers(name: str, url: str, path: str, advice: str) -> Check:
    target = url.rstrip("/").removesuffix("/v1") + path
    try:
        async with httpx.AsyncClient(timeout=_HTTP_TIMEOUT_S) as client:
            response = await client.get(target)
    except httpx.HTTPError as error:
        return Check(name, "failure", f"{target}: {error or type(error).__name__}", advice)
    if response.status_code >= 400:
        detail = f"{target} answered {response.status_code}: {response.text[:200]}"
        return Check(name, "failure", detail, advice)
    return Check(name, "ok", target)


def _is_installed(name: str) -> bool:
    return importlib.util.find_spec(name) is not None


def _file_names(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir()] if folder.is_dir() else []


def _existing(path: Path) -> Path:
    """The path, or the nearest folder above it that exists."""
    path = path.absolute()
    return next(folder for folder in (path, *path.parents) if folder.exists())
