"""One dimension of VBench, computed by the package in its own environment: ``PYTHON vbench_process.py REQUEST``.

VBench pins numpy < 2 and transformers 4.33, so this file runs under another Python and imports nothing of ours. REQUEST
is JSON: ``device``, ``info`` (file of the suite's entries), ``videos`` (folder), ``out`` and ``dimension``; or ``raft``
(weights), ``videos`` and ``out`` for the static filter. VBench's own command takes PATH's ``python`` and fixes CUDA.
"""

import argparse
import json
import sys


def main(request):
    if "raft" in request:
        from vbench.cli.static_filter import static_filter

        options = {"small": False, "mixed_precision": False, "alternate_corr": False}
        options.update(model=request["raft"], videos_path=request["videos"], result_path=request["out"])
        options.update(store_name="filtered.json", filter_scope="temporal_flickering")
        static_filter(argparse.Namespace(**options))
        return
    from vbench import VBench

    dimension = request["dimension"]
    vbench = VBench(request["device"], request["info"], request["out"])
    vbench.evaluate(videos_path=request["videos"], name=dimension, dimension_list=[dimension], local=True)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
