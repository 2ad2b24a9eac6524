"""A trainer beside a server: it samples from the server, trains a copy of the model in torch, and sends the new weights back.

    pagerunner serve demo --device cpu --port 8000 --weight-transfer-config '{"backend": "gloo"}'
    python scripts/rl_trainer.py --url http://127.0.0.1:8000 --model MODEL_DIRECTORY --steps 5

It is an example of REINFORCE in its shortest form: answers with more tokens of even numbers get a higher reward. What is of use elsewhere is `Sender`. It
needs torch and nothing of pagerunner. On CUDA devices (`--backend nccl`) trainer and server need one each.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import socket
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterable, Iterator
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from typing import Any

import torch
import torch.distributed
from torch.distributed import BroadcastOptions, ProcessGroupGloo, TCPStore

PACKED_BYTES = 2**30


class Server:
    """Calls of a server. The routes of weights are control routes, which an admin key opens if the server has keys."""

    def __init__(self, url: str, key: str = "") -> None:
        self._url, self._key = url.rstrip("/"), key

    def __call__(self, path: str, body: Any = None, method: str = "POST") -> Any:
        """Call a route. Raises RuntimeError with the server's sentence."""
        headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {self._key}"} if self._key else {})
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(f"{self._url}{path}", data, headers, method=method)
        try:
            with urllib.request.urlopen(request, timeout=600) as response:
                return json.loads(response.read() or b"{}")
        except urllib.error.HTTPError as error:
            raise RuntimeError(json.loads(error.read())["error"]["message"]) from None


class Sender:
    """The trainer's end of a group with all ranks of a server. The trainer is rank 0."""

    def __init__(self, server: Server, backend: str = "gloo", address: str = "127.0.0.1", seconds: float = 300) -> None:
        """Open a store at `address`, and wait until all ranks have joined. With NCCL this process sends from its current device."""
        self._server, self._threads, self._seconds = server, ThreadPoolExecutor(1), seconds
        self._device = "cuda" if backend == "nccl" else "cpu"
        size = 1 + server("/get_world_size", method="GET")["world_size"]
        listener = socket.create_server((address, 0))  # a port that is bound can't be taken by another process
        port, limit = listener.getsockname()[1], datetime.timedelta(seconds=seconds)
        self._store = TCPStore(
            address,
            port,
            size,
            is_master=True,
            timeout=limit,
            wait_for_workers=False,
            master_listen_fd=listener.detach(),
        )
        self._store.set("lengths", "before each piece")  # the server asks for this key
        place = {"master_address": address, "master_port": port, "rank_offset": 1, "world_size": size}
        call = self._threads.submit(server, "/init_weight_transfer_engine", {"init_info": place})
        joining: Future[Any] = Future()

        def join() -> None:
            try:
                joining.set_result(self._join(backend, address, size, limit))
            except Exception as error:
                joining.set_exception(error)

        threading.Thread(target=join, daemon=True).start()  # if the server refuses, nobody waits for this one's end
        done, _ = wait([call, joining], return_when=FIRST_EXCEPTION)
        for one in done:
            one.result()
        self._group = joining.result()

    def _join(self, backend: str, address: str, size: int, limit: datetime.timedelta) -> Any:
        if backend == "nccl":
            os.environ.setdefault("NCCL_NVLS_ENABLE", "0")  # as the engine: sums by multicast are off
            if address == "127.0.0.1":
                os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
            nccl: Any = vars(torch.distributed)["ProcessGroupNCCL"]
            options = nccl.Options()
            options._timeout = limit
            return nccl(self._store, 0, size, options)
        options = ProcessGroupGloo._Options()
        options._devices = [ProcessGroupGloo.create_device(hostname=address)]
        options._timeout = limit
        return ProcessGroupGloo(self._store, 0, size, options)

    def send(self, weights: Iterable[tuple[str, torch.Tensor]], *, packed: bool = True) -> None:
        """Replace weights of the server by these, which have a checkpoint's names.

        Raises RuntimeError with the server's sentence, or if the server doesn't take a piece in time. Neither is joined then: make another Sender.
        """
        named = [(name, tensor.detach().to(self._device)) for name, tensor in weights]
        update = {
            "names": [name for name, _ in named],
            "dtype_names": [str(tensor.dtype).removeprefix("torch.") for _, tensor in named],
            "shapes": [list(tensor.shape) for _, tensor in named],
            "packed": packed,
            "packed_buffer_size_bytes": PACKED_BYTES,
        }
        self._server("/start_weight_update")
        call = self._threads.submit(self._server, "/update_weights", {"update_info": update})
        try:
            for piece in pieces((tensor for _, tensor in named), PACKED_BYTES if packed else 0):
                self._broadcast(piece, call)
            self._broadcast(torch.empty(0, dtype=torch.uint8), call)
            call.result()
            self._server("/finish_weight_update")
        except RuntimeError:
            self._group = None  # closes the ways to ranks that still wait
            call.result()  # if the server has refused the update, its sentence says more
            raise

    def _broadcast(self, piece: torch.Tensor, call: Future[Any]) -> None:
        """Send a piece: its length, and its bytes. One of no bytes ends the update."""
        options, until = BroadcastOptions(), time.monotonic() + self._seconds
        options.rootRank, options.rootTensor = 0, 0
        for tensor in (torch.tensor([len(piece)], device=self._device), piece)[: 1 + bool(len(piece))]:
            work = self._group.broadcast([tensor], options)
            while not work.is_completed():  # a server that has refused the update doesn't take the piece
                if call.done() and call.exception() is not None:
                    raise RuntimeError("the server doesn't take the update")
                if time.monotonic() > until:
                    raise RuntimeError(f"the server hasn't taken {len(piece):,} bytes in {self._seconds:g} seconds")
                wait([call], timeout=0.001)
            work.wait()


def pieces(tensors: Iterable[torch.Tensor], most: int) -> Iterator[torch.Tensor]:
    """Tensors as bytes. A piece ends with the tensor that makes it larger than `most` bytes."""
    held: list[torch.Tensor] = []
    for tensor in tensors:
        held.append(tensor.contiguous().view(-1).view(torch.uint8))
        if sum(map(len, held)) > most:
            yield torch.cat(held)
            held = []
    if held:
        yield torch.cat(held)


def reward(tokens: list[int]) -> float:
    """The share of an answer's tokens whose number is even."""
    return sum(token % 2 == 0 for token in tokens) / len(tokens)


def train(server: Server, sender: Sender, path: str, steps: int, prompt: list[int], answers: int = 16) -> Any:
    """Sample, learn, send; `steps` times. Returns the trained model, which is what the server has."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    ask = {
        "prompt": prompt,
        "n": answers,
        "max_tokens": 24,
        "temperature": 1,
        "ignore_eos": True,
        "return_token_ids": True,
    }
    for step in range(steps):
        sampled = [choice["token_ids"] for choice in server("/v1/completions", {**ask, "seed": step})["choices"]]
        rewards = torch.tensor([reward(tokens) for tokens in sampled])
        advantages = (rewards - rewards.mean()) / (rewards.std() + 1e-6)
        rows = torch.tensor([prompt + tokens for tokens in sampled])
        logprobs = model(rows[:, :-1]).logits.log_softmax(-1).gather(-1, rows[:, 1:, None])[..., 0]
        loss = -(advantages * logprobs[:, len(prompt) - 1 :].mean(-1)).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        sender.send(model.named_parameters())
        print(f"step {step}: reward {rewards.mean():.3f}, loss {loss.item():.3f}", flush=True)
    return model


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--model", required=True, help="the directory that the server serves")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--backend", default="gloo", choices=("gloo", "nccl"))
    options = parser.parse_args()
    server = Server(options.url, os.environ.get("PAGERUNNER_ADMIN_KEY", ""))
    prompt = server("/tokenize", {"prompt": "The"})["tokens"]
    train(server, Sender(server, options.backend), options.model, options.steps, prompt)


if __name__ == "__main__":
    main()
