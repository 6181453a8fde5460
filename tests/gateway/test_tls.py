"""The gateway over HTTPS, as the SDKs see it."""

import ssl
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import trustme

from turnfold.gateway.app import check_tls
from turnfold.gateway.settings import Settings
from turnfold.schemas.settings import SettingsError


def certificate(directory: Path) -> tuple[trustme.CA, Settings]:
    authority = trustme.CA()
    issued = authority.issue_cert("127.0.0.1")
    chain, private = directory / "chain.pem", directory / "key.pem"
    chain.write_bytes(b"".join(pem.bytes() for pem in issued.cert_chain_pems))
    private.write_bytes(issued.private_key_pem.bytes())
    return authority, Settings(tls_certificate=str(chain), tls_key=str(private))


async def test_an_agent_talks_to_a_gateway_over_https(stack: Any, tmp_path: Path) -> None:
    authority, tls = certificate(tmp_path)
    url = await stack.start_gateway(
        tls_certificate=tls.tls_certificate, tls_key=tls.tls_key, public_url=""
    )
    trusted = ssl.create_default_context()
    authority.configure_trust(trusted)
    async with httpx.AsyncClient(verify=trusted, trust_env=False, base_url=url) as http:
        started = await http.post(
            "/v1/rollouts", headers={"authorization": "Bearer control"}, json={"group_id": "g"}
        )
        assert started.status_code == 200, started.text
        access = started.json()
        assert access["base_url"].startswith("https://")
        stack.engine.script(stack.says("hello"))
        agent = openai.AsyncOpenAI(
            base_url=access["base_url"], api_key=access["api_key"], http_client=http
        )
        answer = await agent.chat.completions.create(
            model="m", messages=[{"role": "user", "content": "hi"}]
        )
    assert answer.choices[0].message.content == "hello"


def test_what_does_not_serve_is_named_at_start(tmp_path: Path) -> None:
    _, settings = certificate(tmp_path)
    for wrong, named in (
        (Settings(tls_key=settings.tls_key), "TURNFOLD_TLS_CERTIFICATE is not"),
        (Settings(tls_certificate=str(tmp_path / "none.pem")), "none.pem"),
        (Settings(tls_certificate=settings.tls_key, tls_key=settings.tls_key), "expected a PEM"),
    ):
        with pytest.raises(SettingsError, match=named):
            check_tls(wrong)
