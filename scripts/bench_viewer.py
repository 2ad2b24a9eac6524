"""What it costs that somebody looks at /ui: streams against one server, with and without a viewer, in turns.

    python scripts/bench_viewer.py [--streams 64] [--rounds 10] [--output-len 128]

The viewer reads `GET /ui/live` as the page does. Every round runs once with it and once without, in changing order, on fresh
prompts; what counts is the median of the rounds' ratios, of rates and of the core's CPU time.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import statistics
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path

from bench_server_overhead import children, cpu_seconds, engine_options, online, write_checkpoint


@contextlib.asynccontextmanager
async def viewer(port: int) -> AsyncIterator[None]:
    """Somebody who looks."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=2**20)
    writer.write(b"GET /ui/live HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
    assert (await reader.readline()).startswith(b"HTTP/1.1 200")

    async def read() -> None:
        while await reader.read(2**18):
            pass

    reading = asyncio.create_task(read())
    yield
    reading.cancel()
    writer.close()


async def one_run(port: int, options: argparse.Namespace, salt: int, core: int, watched: bool) -> tuple[float, float]:
    """Seconds, and CPU seconds of the core."""
    async with viewer(port) if watched else contextlib.nullcontext():
        await asyncio.sleep(0.5)  # both kinds of run begin after the same pause
        before = cpu_seconds(core)
        seconds, _ = await online(port, options, salt)
        return seconds, cpu_seconds(core) - before


def measure(options: argparse.Namespace, directory: Path) -> None:
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in engine_options(options).items()]
    command = [sys.executable, "-m", "pagerunner", "serve", str(directory), "--port=0", "--quiet", *flags]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout
        port = int(server.stdout.readline().rsplit(":", 1)[1])
        core = children(server.pid)[0]
        rates, cpu = [], []
        for number in range(options.rounds + 1):
            order = (True, False) if number % 2 else (False, True)
            found = {one: asyncio.run(one_run(port, options, 2 * number + one, core, one)) for one in order}
            if number:  # the first round is the first use of everything
                rates.append(found[False][0] / found[True][0])
                cpu.append(found[True][1] / found[False][1])
                print(f"round {number}: rate {rates[-1]:.3f}, core's CPU time {cpu[-1]:.3f} of without", flush=True)
        print(f"with a viewer: rate x {statistics.median(rates):.3f}, core's CPU time x {statistics.median(cpu):.3f}")
    finally:
        server.terminate()
        server.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--input-len", type=int, default=32)
    parser.add_argument("--output-len", type=int, default=128)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="pagerunner-bench-") as directory:
        measure(options, write_checkpoint(Path(directory)))


if __name__ == "__main__":
    main()
