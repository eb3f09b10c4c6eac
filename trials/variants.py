"""Variants of the sources: (file, from, to) each; every `from` must be there once."""

VARIANTS = {
    "now": [],
    # main's hint.
    "normal": [
        ("kernels/lean/ptx.cuh", "createpolicy.fractional.L2::evict_unchanged.b64", "createpolicy.fractional.L2::evict_normal.b64"),
    ],
    # Rests of output tiles stay with the range that they begin.
    "norest": [
        ("kernels/lean/schedule.cuh", "const bool deals_rests = RAGGED && !FIXED_RUNS;", "const bool deals_rests = false;"),
        ("kernels/lean/schedule.cuh", "const int rest = RAGGED ? part.end_tiles + short_rest(p) : 0;", "const int rest = 0;"),
    ],
    # Only rests without tokens, the ends, go to the range before.
    "rest0": [
        ("kernels/lean/schedule.cuh", "{ return max(1, p.merge_tiles); }", "{ return 0; }"),
    ],
    # No packed output tiles.
    "nopack": [
        ("kernels/lean/build.cuh", "constexpr bool PACKS = RAGGED &&", "constexpr bool PACKS = false && RAGGED &&"),
    ],
    # A part of no more chunks than a CTA has warps is one CTA's of the cluster.
    "alone": [
        ("kernels/lean/reduce.cuh", "                                            unsigned char *shared, bool first_part, u32 epoch) {\n  const float *scratch",
         "                                            unsigned char *shared, bool &arrived, u32 epoch) {\n  // A part of few chunks is one CTA's of the cluster: nobody waits.\n  const bool alone = CLUSTER > 1 && part.chunks <= WARPS;\n  if (alone && rank > 0) return;\n  const float *scratch"),
        ("kernels/lean/reduce.cuh", "  if (!first_part) barrier_cluster_wait();  // the peers have read the part before\n  publish_partial(own, scratch, logs);\n  barrier_cluster_arrive();\n  barrier_cluster_wait();\n",
         "  if (!alone) {\n    if (arrived) barrier_cluster_wait();  // the peers have read the part before\n    publish_partial(own, scratch, logs);\n    barrier_cluster_arrive();\n    barrier_cluster_wait();\n  }\n"),
        ("kernels/lean/reduce.cuh", "  for (int base = 0; base < SLICE; base += THREADS / TEAM) {\n    const int within = base + threadIdx.x / TEAM, wanted = rank * SLICE + within;\n    const bool valid = within < SLICE && wanted < QUADS;",
         "  for (int base = 0; base < (alone ? QUADS : SLICE); base += THREADS / TEAM) {\n    const int within = base + threadIdx.x / TEAM, wanted = alone ? within : rank * SLICE + within;\n    const bool valid = (alone || within < SLICE) && wanted < QUADS;"),
        ("kernels/lean/reduce.cuh", "    const Piece piece = merge_cluster<TEAM>(shared_address(own), quad);",
         "    const Piece piece = alone ? merge_warps<TEAM>(scratch, logs, quad)\n                              : merge_cluster<TEAM>(shared_address(own), quad);"),
        ("kernels/lean/reduce.cuh", "  }\n#if CLUSTER > 1\n  barrier_cluster_arrive();\n#endif\n}",
         "  }\n#if CLUSTER > 1\n  if (!alone) {\n    barrier_cluster_arrive();\n    arrived = true;\n  }\n#endif\n}"),
        ("kernels/lean/lean.cu", "  bool first_part = true, fresh = true;  //", "  bool arrived = false;  // CLUSTER: at the barrier that says that the peers have been read\n  bool first_part = true, fresh = true;  //"),
        ("kernels/lean/lean.cu", "reduce_part(p, part, splits, slot, rank, shared, first_part, p.epoch + replays);", "reduce_part(p, part, splits, slot, rank, shared, arrived, p.epoch + replays);"),
        ("kernels/lean/lean.cu", "  if (!first_part) barrier_cluster_wait();  // no peer", "  if (arrived) barrier_cluster_wait();  // no peer"),
    ],
}


def apply(tree, name):
    for file, old, new in VARIANTS[name]:
        path = tree / file
        text = path.read_text()
        assert text.count(old) == 1, (name, file, old, text.count(old))
        path.write_text(text.replace(old, new))
