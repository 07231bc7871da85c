"""Small-kernel inference: a deep narrow network, one request at a time, as a loop of many short kernels. One JSON line."""

import argparse
import json
import time

import torch


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=20)
    parser.add_argument("--requests", type=int, default=0, help="a fixed number instead of seconds")
    parser.add_argument("--gap-ms", type=float, default=0.0)
    parser.add_argument("--graph", action="store_true", help="replay a CUDA graph of the network")
    args = parser.parse_args()
    torch.manual_seed(7)
    blocks = [torch.nn.Sequential(torch.nn.Linear(512, 512), torch.nn.GELU(), torch.nn.LayerNorm(512)) for _ in range(24)]
    model = torch.nn.Sequential(*blocks).cuda().eval()
    static = torch.randn(8, 512, device="cuda")
    with torch.inference_mode():
        for _ in range(5):
            out = model(static)
        torch.cuda.synchronize()
        graph = None
        if args.graph:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                out = model(static)
        began, done = time.monotonic(), 0
        while done < args.requests if args.requests else time.monotonic() - began < args.seconds:
            if graph is not None:
                graph.replay()
            else:
                out = model(static)
            torch.cuda.synchronize()
            done += 1
            if args.gap_ms:
                time.sleep(args.gap_ms / 1000)
        wall = time.monotonic() - began
    print(json.dumps({"requests": done, "wall_s": wall, "requests_per_s": done / wall, "sum": float(out.double().sum())}))


main()
