"""A remote environment in one file: your own service plays whole episodes and reports each exactly once.

    pip install starlette uvicorn openai httpx
    uvicorn remote_env:app --port 8900        # then: [agent] kind = "remote", url = "http://127.0.0.1:8900"

The agent here answers with one message and is paid for being brief; put your product in its place. Give an agent that runs what the
model writes the `api_key` alone: whoever has the `status_key` can report a reward.
"""

import asyncio
import contextlib

import httpx
from openai import AsyncOpenAI
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

RETRY_S = 1.0
statuses: dict[str, dict] = {}
"""By rollout id. A real service would keep them in its database."""
playing: dict[str, asyncio.Task] = {}


async def play(job: dict) -> dict:
    """One episode: use the model that the job names, then say what it was worth."""
    client = AsyncOpenAI(base_url=job["model_base_url"], api_key=job["api_key"])
    question = [{"role": "user", "content": job["task"]["instruction"]}]
    answer = await client.chat.completions.create(model=job["model"], messages=question)
    text = answer.choices[0].message.content or ""
    return {"status": "finished", "reward": 1.0 if len(text) < 80 else 0.0, "note": f"{len(text)} characters"}


async def episode(job: dict) -> None:
    try:
        async with asyncio.timeout(job["deadline_s"]):
            status = await play(job)
    except asyncio.CancelledError:
        status = {"status": "cancelled"}
    except Exception as error:  # noqa: BLE001 - whatever breaks here is a failure of ours, never the policy's
        status = {"status": "failed", "error": f"{type(error).__name__}: {error}", "boundary": "harness"}
    statuses[job["rollout_id"]] = status
    async with httpx.AsyncClient(headers={"authorization": f"Bearer {job['status_key']}"}) as http:
        for _ in range(30):
            with contextlib.suppress(httpx.TransportError):
                told = await http.post(job["status_url"], json=status)
                if told.status_code < 500:  # 200: taken or known; 409, 410: it has ended otherwise
                    return
            await asyncio.sleep(RETRY_S)


async def init(request: Request) -> JSONResponse:
    job = await request.json()
    if job["rollout_id"] not in statuses:  # the same id again is the same episode
        statuses[job["rollout_id"]] = {"status": "running"}
        playing[job["rollout_id"]] = asyncio.create_task(episode(job))
    return JSONResponse({"rollout_id": job["rollout_id"]})


async def status(request: Request) -> JSONResponse:
    found = statuses.get(request.path_params["rollout_id"])
    return JSONResponse(found) if found else JSONResponse({"error": "unknown rollout"}, 404)


async def cancel(request: Request) -> JSONResponse:
    if task := playing.get((await request.json())["rollout_id"]):
        task.cancel()
    return JSONResponse({})


app = Starlette(
    routes=[Route("/init", init, methods=["POST"]), Route("/status/{rollout_id}", status), Route("/cancel", cancel, methods=["POST"])]
)
