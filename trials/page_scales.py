"""fp8 caches with scales of pages: 60 random problems against the fp64 reference, then times beside
scales of sequences and none. Run in a checkout of the branch: python gpu_job.py [seconds]; it
takes some 50 s on one H200 with 16 cores, most of it compiling.
"""

from __future__ import annotations

import os
import random
import statistics
import sys
import time

START = time.monotonic()
LIMIT_S = float(sys.argv[1]) if len(sys.argv) > 1 else 58.0
sys.path.insert(0, os.getcwd())


def left() -> float:
    return LIMIT_S - (time.monotonic() - START)


def draw_problems(seed: int, count: int) -> list:
    from leanbench.core.errors import UserError
    from leanbench.core.problem import AttentionProblem

    draw, problems = random.Random(seed), []
    pages, q_lens = (1, 16, 64, 128), (1, 4, 64)
    while len(problems) < count:
        # Every page size with every number of query tokens and both dtypes.
        number = len(problems)
        page, q_len = pages[number % 4], q_lens[number // 4 % 3]
        fields = {
            "page_size": page,
            "q_len": q_len,
            "kv_dtype": ("e4m3", "e5m2")[number // 12 % 2],
            "page_scales": draw.choice(("page", "page-head")),
            "scaled": draw.random() < 0.5,
            "kv_layout": draw.choice(("NHD", "HND")),
            "dtype": draw.choice(("fp16", "bf16", "bf16")),
        }
        q_heads, kv_heads = draw.choice(((8, 8), (8, 2), (32, 8), (16, 1), (12, 2), (48, 8)))
        batch = draw.choice((1, 2, 3, 8, 40 if q_len == 1 else 3))
        longest = draw.choice((60, 700, 3000, 9000))
        context = longest
        if batch > 1 and draw.random() < 0.7:
            context = tuple(draw.randint(1, longest) for _ in range(batch))
            fields |= {"lengths_on": "device", "capacity": draw.choice(("1x", "2x"))}
        elif draw.random() < 0.5:
            fields |= {"lengths_on": "device", "capacity": "2x"}
        if fields.get("capacity") == "1x":
            del fields["capacity"]
        if draw.random() < 0.3:
            fields["window_left"] = draw.choice((0, 100, 1000))
        if draw.random() < 0.3:
            fields["sinks"] = True
        if draw.random() < 0.3:
            fields["softcap"] = draw.choice((5.0, 30.0))
        if draw.random() < 0.2:
            fields["alibi"] = True
        if draw.random() < 0.2:
            fields["leftpad"] = True
        if draw.random() < 0.2 and q_len > 1:
            fields["causal"] = False
        if draw.random() < 0.2:
            fields["q_dtype"] = draw.choice(("e4m3", "e5m2"))
            fields["dtype"] = "bf16"
        if draw.random() < 0.15 and q_len > 1 and batch > 1:
            fields["q_lens"] = (q_len, *(draw.randint(1, q_len) for _ in range(batch - 1)))
        if draw.random() < 0.2:
            fields["append"] = draw.randint(1, 3)
        head_dim = draw.choice((64, 128, 128, 256, 80))
        try:
            problems.append(
                AttentionProblem(batch, q_heads, kv_heads, context, head_dim, **fields)
            )
        except UserError:
            continue
    return problems


def settings(problem, spec):
    from leanbench.configs.lookup import choose
    from leanbench.core.registry import kernel

    return choose(kernel("lean_cuda"), problem, spec).config


def timed_problems() -> list:
    from leanbench.core.problem import AttentionProblem

    def one(batch: int, context: int, page: int):
        return AttentionProblem(
            batch, 32, 8, context, 128, "bf16", "NHD",
            page_size=page, kv_dtype="e4m3", lengths_on="device",
        )

    return [
        one(1, 4096, 64), one(1, 32768, 64), one(8, 8192, 1),
        one(8, 8192, 16), one(8, 8192, 64), one(32, 4096, 64),
    ]


def call(inputs, config=None):
    from leanbench.attention import lean_attn_with_kvcache
    from leanbench.check.launches import api_arguments

    arguments = api_arguments(inputs)
    return lean_attn_with_kvcache(
        inputs.q, inputs.k_cache, inputs.v_cache, **arguments, out=inputs.out, config=config
    )


def check(problem, config, scale: float) -> str | None:
    from dataclasses import replace

    import torch

    from leanbench.check.poison import poison_unused
    from leanbench.check.reference import Reference
    from leanbench.core.inputs import make_inputs
    from leanbench.core.registry import kernel

    inputs = poison_unused(make_inputs(problem, "cuda", score_scale=scale))
    # What is appended is the same again: the cache before is not needed.
    reference = Reference(inputs, max_pairs=24)
    bits = None
    for _ in range(2):
        inputs.poison()
        out, lse = call(inputs, config)
        torch.cuda.synchronize()
        result = reference.check(replace(inputs, out=out, lse=lse))
        failure = result.failure(kernel("lean_cuda").precision(problem))
        if failure:
            return failure
        if bits is not None and not (torch.equal(bits[0], out) and torch.equal(bits[1], lse)):
            return "other bits the second time"
        bits = out.clone(), lse.clone()
    return None


def check_special() -> list[str]:
    """Page numbers past the end that no cache has, NaN scales of pages of nobody; both products."""
    from dataclasses import replace

    import torch

    from leanbench.check.poison import poison_unused
    from leanbench.check.reference import Reference
    from leanbench.core.inputs import make_inputs
    from leanbench.core.problem import AttentionProblem

    failures = []
    for page in (1, 16, 64):
        problem = AttentionProblem(
            2, 32, 8, (900, 30), 128, "bf16", "NHD", page_size=page, kv_dtype="e4m3",
            page_scales="page-head", capacity=4096, lengths_on="device",
        )
        inputs = poison_unused(make_inputs(problem, "cuda"))
        last, moved = inputs.k_cache.shape[0] - 1, {}
        for name in ("k_cache", "v_cache", "k_page_descale", "v_page_descale"):
            own = getattr(inputs, name)
            numbers = own.view(torch.uint8) if own.element_size() == 1 else own
            moved[name] = numbers.roll(1, 0).view(own.dtype)
        table = inputs.block_table
        moved["block_table"] = (table + 1).masked_fill(table == last, 1 << 28)
        inputs = replace(inputs, **moved)
        inputs.poison()
        out, lse = call(inputs)
        torch.cuda.synchronize()
        failure = Reference(inputs).check(replace(inputs, out=out, lse=lse)).failure("bf16")
        if failure:
            failures.append(f"pages of nobody, page size {page}: {failure}")
        far = replace(
            inputs,
            k_page_descale=inputs.k_page_descale * 4, k_descale=inputs.k_descale / 4,
            v_page_descale=inputs.v_page_descale * 2.0**-90, v_descale=inputs.v_descale * 2.0**90,
            out=torch.empty_like(inputs.out),
        )
        out_far, lse_far = call(far)
        if not (torch.equal(out, out_far) and torch.equal(lse, lse_far)):
            failures.append(f"scales moved by powers of two give other bits, page size {page}")
    return failures


class Timed:
    """A captured call over copies that do not fit into the L2 together."""

    def __init__(self, problem) -> None:
        from dataclasses import replace

        import torch

        from leanbench.core.inputs import make_inputs

        copies = max(2, -(-400_000_000 // problem.kv_bytes))
        copies = min(copies, 24)
        self.count = copies
        self.inputs = [make_inputs(problem, "cuda") for _ in range(copies)]
        for inputs in self.inputs[:1]:
            call(inputs)
        torch.cuda.synchronize()
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            for inputs in self.inputs:
                call(inputs)
        self.samples: list[float] = []
        self.replays = 1

    def sample(self) -> float:
        import torch

        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(self.replays):
            self.graph.replay()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) * 1e3 / (self.count * self.replays)


def variants(problem) -> dict:
    from dataclasses import replace

    return {
        "none": replace(problem, scaled=False),
        "sequences": problem,
        "pages": replace(problem, scaled=False, page_scales="page"),
        "page heads": replace(problem, scaled=False, page_scales="page-head"),
    }


def main() -> int:
    import torch

    from leanbench.compile.build import Job, build_all, process_pool
    from leanbench.gpu.local import spec_of_device

    spec = spec_of_device(0)
    seed = random.SystemRandom().randrange(10**6)
    problems = draw_problems(seed, 60)
    own = [(problem, settings(problem, spec)) for problem in problems]
    timed = timed_problems()
    jobs = [Job("lean_cuda", problem, config) for problem, config in own]
    jobs += [
        Job("lean_cuda", variant, settings(variant, spec))
        for problem in timed
        for variant in variants(problem).values()
    ]
    capability = torch.cuda.get_device_capability()
    with process_pool() as pool:
        builds = build_all(jobs, capability, pool)
    broken = [f"{b.job.problem.label}: {b.failure}" for b in builds if b.failure]
    spills = [
        f"{b.job.problem.label}: {r.spilled_registers}"
        for b in builds for r in b.resources if r.spilled_registers
    ]
    print(f"compiled {len(jobs)} in {time.monotonic() - START:.1f} s; failed {broken}; spills {spills}", flush=True)

    wrong, done = [], 0
    for number, (problem, config) in enumerate(own):
        if left() < 22:
            break
        try:
            failure = check(problem, config, (1.0, 4.0)[number % 2])
        except Exception as error:
            failure = f"{type(error).__name__}: {str(error)[:200]}"
        done += 1
        if failure:
            wrong.append(f"{problem.label}: {failure}")
    try:
        wrong += check_special()
    except Exception as error:
        wrong.append(f"special: {type(error).__name__}: {str(error)[:300]}")
    print(f"checked after {time.monotonic() - START:.1f} s", flush=True)

    rows = []
    for problem in timed:
        if left() < 4:
            break
        try:
            sets = {name: Timed(variant) for name, variant in variants(problem).items()}
            for own_set in sets.values():
                own_set.sample()
                once = own_set.sample() * own_set.count
                own_set.replays = max(1, round(4000 / once))
            for _ in range(13):
                for own_set in sets.values():
                    own_set.samples.append(own_set.sample())
            rows.append((problem, {n: statistics.median(s.samples) for n, s in sets.items()}))
            del sets
            torch.cuda.empty_cache()
        except Exception as error:
            wrong.append(f"timing {problem.label}: {type(error).__name__}: {str(error)[:200]}")

    print(f"seed {seed}: {done} random problems and 6 special ones, {len(wrong)} wrong; {torch.cuda.get_device_name()}")
    for line in wrong[:12]:
        print("WRONG", line)
    print(f"{'batch x context, page':<24} {'MB':>5} {'none':>8} {'seqs':>8} {'pages':>8} {'heads':>8}  us; over none; TB/s of pages")
    for problem, us in rows:
        ratios = " ".join(f"{us[n] / us['none']:.3f}" for n in ("sequences", "pages", "page heads"))
        name = f"{problem.batch} x {problem.max_context}, {problem.page_size}"
        print(
            f"{name:<24} {problem.kv_bytes / 1e6:>5.0f} "
            + " ".join(f"{us[n]:>8.2f}" for n in us)
            + f"  {ratios}  {problem.kv_bytes / us['page heads'] / 1e6:.2f}"
        )
    print(f"{time.monotonic() - START:.0f} s")
    return 1 if wrong or broken else 0


if __name__ == "__main__":
    sys.exit(main())
