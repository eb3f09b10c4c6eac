"""Variants of the branch's sources beside the branch: (file, from, to); every `from` must be there once."""

VARIANTS = {
    # An output tile of no more chunks than a CTA has warps is written by the cluster's first CTA; nobody waits.
    "alone2": [
        ("kernels/lean/reduce.cuh",
         "// Merges the CTA's warps, and the cluster's CTAs, and reduces this CTA's slice.",
         "#if CLUSTER > 1 && !PEERS\n"
         "// Writes an output tile whose chunks the cluster's first CTA has all computed.\n"
         "__device__ __forceinline__ void write_alone(const Params &p, const Position &part,\n"
         "                                            const unsigned char *shared) {\n"
         "  const float *scratch = reinterpret_cast<const float *>(shared + SCRATCH_AT);\n"
         "  const float2 *logs = reinterpret_cast<const float2 *>(shared + LOGS_AT);\n"
         "#pragma unroll 1\n"
         "  for (int quad = threadIdx.x; quad < QUADS; quad += THREADS)\n"
         "    finish_piece(p, part, quad, merge_warps<1>(scratch, logs, quad), shared);\n"
         "}\n"
         "#endif\n\n"
         "// Merges the CTA's warps, and the cluster's CTAs, and reduces this CTA's slice."),
        ("kernels/lean/lean.cu", "  bool first_part = true, fresh = true;  //", "  bool exchanged = false;  // CLUSTER: the CTAs have read one another's partials\n  bool first_part = true, fresh = true;  //"),
        ("kernels/lean/lean.cu",
         "      reduce_part(p, part, splits, slot, rank, shared, first_part, p.epoch + replays);\n",
         "#if CLUSTER > 1 && !PEERS\n"
         "      if (__builtin_expect(part.chunks <= WARPS && splits.count == 1, 0)) {\n"
         "        if (rank == 0) write_alone(p, part, shared);\n"
         "      } else\n"
         "#endif\n"
         "      {\n"
         "        reduce_part(p, part, splits, slot, rank, shared, !exchanged, p.epoch + replays);\n"
         "        exchanged = true;\n"
         "      }\n"),
        ("kernels/lean/lean.cu", "  if (!first_part) barrier_cluster_wait();  // no peer", "  if (exchanged) barrier_cluster_wait();  // no peer"),
    ],
}


def apply(tree, name):
    for file, old, new in VARIANTS[name]:
        path = tree / file
        text = path.read_text()
        assert text.count(old) == 1, (name, file, old, text.count(old))
        path.write_text(text.replace(old, new))
