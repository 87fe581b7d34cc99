"""vLLM on CPUs as a peer of `cargo xtask bench`: MODEL (a Hugging Face folder), THREADS.

The engine runs in this process and is stepped by hand, so that neither a server nor another process costs it
anything. Prompts are not cached; compilation is as vLLM chooses.
"""

import os
import sys

from cases import Arrivals, keep_standard_output, serve

answers = keep_standard_output()
folder, threads = sys.argv[1:]
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", f"0-{int(threads) - 1}")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")

from vllm import LLM, SamplingParams  # noqa: E402  (after its environment)

if __name__ == "__main__":
    llm = LLM(
        model=folder,
        dtype="bfloat16",
        max_model_len=4096,
        max_num_seqs=64,
        enable_prefix_caching=False,
    )
    engine = llm.llm_engine
    vocabulary = engine.model_config.get_vocab_size()
    asked = 0

    def run(case):
        global asked
        sampling = SamplingParams(temperature=0.0, max_tokens=case.tokens, ignore_eos=True, detokenize=False)
        prompts = case.prompts(vocabulary)
        arrivals = Arrivals()
        for prompt in prompts:
            asked += 1
            engine.add_request(str(asked), {"prompt_token_ids": prompt}, sampling)
        while engine.has_unfinished_requests():
            for output in engine.step():
                arrivals.came(output.request_id, len(output.outputs[0].token_ids))
        return arrivals.round(case)

    serve(answers, run)
