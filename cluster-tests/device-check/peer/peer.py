#!/usr/bin/env python3
"""What the check measures, done in PyTorch: `peer.py SOCKET` answers cases over a Unix socket, one line of JSON each.

A request names its case and its sizes; the answer is {"seconds": ..}, the median of replays of a CUDA graph, or
{"error": ".."}. `--device cpu` is for trying this program out where there is no GPU: nothing is in a graph then.
"""

import argparse
import collections
import json
import os
import socket
import sys
import threading
import time

import torch

import cases

REPLAYS = 15
# Fewer do where they take longer than this together.
REPLAYS_MIN = 5
REPLAYS_ENOUGH_S = 0.3
# Work before the first measured replay: a card's clock is slow after it has had none.
AWAKE_S = 0.015
# Cases whose data is kept, so that one is not made anew each time it is asked.
KEPT = 2


class Bench:
    """Times work on one device."""

    def __init__(self, device):
        self.device = torch.device(device)

    def random(self, *shape, dtype=torch.bfloat16):
        return torch.randn(*shape, device=self.device, dtype=dtype)

    def prepare(self, work, sets):
        """`work(i)` for each of `sets` working sets, in one graph; returns a function that gives seconds of one."""
        if self.device.type != "cuda":
            return lambda: self._seconds_on_cpu(work, sets)
        warm = torch.cuda.Stream()
        warm.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(warm):
            for i in range(min(sets, 3)):
                work(i)
            torch.cuda.synchronize()
            self._refuse_what_waits(work)
        torch.cuda.synchronize()
        graph = self._record(work, sets)

        def seconds():
            # `work` stays as long as this does, and so does what the graph reads: a graph keeps none of it.
            _ = work
            return self._seconds_of(graph) / sets

        return seconds

    @staticmethod
    def _refuse_what_waits(work):
        """Fails for work that waits for the device: a recording of it would, and leave more than itself broken."""
        torch.cuda.set_sync_debug_mode("error")
        try:
            work(0)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    @staticmethod
    def _record(work, sets):
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph):
                for i in range(sets):
                    work(i)
        except Exception:
            # A recording that fails leaves its stream current and the generator in it.
            torch.cuda.set_stream(torch.cuda.default_stream())
            generator = torch.cuda.default_generators[torch.cuda.current_device()]
            generator.graphsafe_set_state(generator.clone_state())
            raise
        return graph

    @staticmethod
    def _seconds_of(graph):
        started = time.perf_counter()
        while time.perf_counter() - started < AWAKE_S:
            graph.replay()
            torch.cuda.synchronize()
        times, started = [], time.perf_counter()
        while len(times) < REPLAYS and (
            len(times) < REPLAYS_MIN or time.perf_counter() - started < REPLAYS_ENOUGH_S
        ):
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            # Keeps the device at work until what is measured is enqueued.
            graph.replay()
            start.record()
            graph.replay()
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end) / 1e3)
        return sorted(times)[len(times) // 2]

    @staticmethod
    def _seconds_on_cpu(work, sets):
        started = time.perf_counter()
        for i in range(sets):
            work(i)
        return (time.perf_counter() - started) / sets


class Server:
    def __init__(self, bench):
        self.bench = bench
        self.kept = collections.OrderedDict()

    def answer(self, line):
        try:
            request = json.loads(line)
            key = json.dumps(request, sort_keys=True)
            if key not in self.kept:
                while len(self.kept) >= KEPT:
                    self.kept.popitem(last=False)
                if self.bench.device.type == "cuda":
                    torch.cuda.empty_cache()
                make = cases.CASES.get(request["case"])
                if make is None:
                    return {"error": f"no case {request['case']!r}"}
                with torch.inference_mode():
                    self.kept[key] = make(self.bench, request)
            with torch.inference_mode():
                return {"seconds": self.kept[key]()}
        except Exception as error:  # an answer, whatever went wrong: the other cases go on
            return {"error": repr(error)[:300]}

    def serve(self, connection):
        with connection, connection.makefile("rw") as stream:
            for line in stream:
                stream.write(json.dumps(self.answer(line)) + "\n")
                stream.flush()


def end_with_parent():
    """Ends this process when the one that started it has ended."""
    parent = os.getppid()

    def watch():
        while os.getppid() == parent:
            time.sleep(0.2)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("socket")
    parser.add_argument("--device", default="cuda")
    arguments = parser.parse_args()
    end_with_parent()
    bench = Bench(arguments.device)
    if bench.device.type == "cuda" and not torch.cuda.is_available():
        sys.exit("PyTorch sees no GPU")
    # Creates the context before anybody waits for an answer.
    bench.random(8, 8) @ bench.random(8, 8)
    server = Server(bench)
    listener = socket.socket(socket.AF_UNIX)
    temporary = arguments.socket + ".new"
    listener.bind(temporary)
    listener.listen(8)
    print(f"PyTorch {torch.__version__} on {bench.device}", flush=True)
    # There when it listens, not before.
    os.rename(temporary, arguments.socket)
    while True:
        connection, _ = listener.accept()
        try:
            server.serve(connection)
        except OSError as error:  # whoever asked has ended: the next one may ask
            print(f"a connection was lost: {error}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
