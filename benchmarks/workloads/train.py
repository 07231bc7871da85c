"""A PyTorch training step in a loop: a small transformer block, its steps counted for a number of seconds. One JSON line."""

import argparse
import json
import os
import time

import torch


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=20)
    parser.add_argument("--warm-up", type=float, default=0, help="seconds before the first step that counts")
    parser.add_argument("--profile", type=int, default=0, help="steps after these, whose kernels' own time is added up")
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--steps", type=int, default=0, help="a fixed number instead of seconds")
    args = parser.parse_args()
    # The same steps give the same loss to the last bit, so that a hook that changed anything would show.
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    torch.use_deterministic_algorithms(True)
    torch.manual_seed(7)
    layer = torch.nn.TransformerEncoderLayer(args.width, 16, 4 * args.width, batch_first=True, dropout=0.0)
    model = torch.nn.Sequential(layer, torch.nn.Linear(args.width, args.width)).cuda()
    optimiser = torch.optim.AdamW(model.parameters(), lr=1e-4, foreach=True)
    data = torch.randn(args.batch, 256, args.width, device="cuda")

    def step() -> torch.Tensor:
        optimiser.zero_grad(set_to_none=True)
        loss = (model(data) - data).square().mean()
        loss.backward()
        optimiser.step()
        return loss

    first = time.monotonic()
    for _ in range(5):
        loss = step()
    torch.cuda.synchronize()
    while time.monotonic() - first < args.warm_up:
        loss = step()
        torch.cuda.synchronize()
    began, steps = time.monotonic(), 0
    while steps < args.steps if args.steps else time.monotonic() - began < args.seconds:
        loss = step()
        steps += 1
        if steps % 10 == 0:
            torch.cuda.synchronize()
    torch.cuda.synchronize()
    wall = time.monotonic() - began
    peak = torch.cuda.max_memory_allocated()
    said: dict[str, float] = {"steps": steps, "wall_s": wall, "steps_per_s": steps / wall}
    for _ in range(2 if args.profile else 0):  # the profiler's own start is in the first
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            for _ in range(args.profile):
                step()
            torch.cuda.synchronize()
        device = [event for event in profile.events() if event.device_type == torch.autograd.DeviceType.CUDA]
        said["kernels_s_per_step"] = sum(event.time_range.elapsed_us() for event in device) / 1e6 / args.profile
    print(json.dumps({**said, "loss": float(loss), "peak_bytes": peak}))


main()
