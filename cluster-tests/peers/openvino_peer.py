"""OpenVINO GenAI on CPUs as a peer of `cargo xtask bench`: MODEL (an F16 GGUF file), THREADS.

Its pipeline with continuous batching is stepped by hand in this process; prompts are not cached.
"""

import sys

from cases import Arrivals, keep_standard_output, serve

answers = keep_standard_output()

import numpy  # noqa: E402
import openvino  # noqa: E402
import openvino_genai as genai  # noqa: E402

if __name__ == "__main__":
    file, threads = sys.argv[1:]
    scheduler = genai.SchedulerConfig()
    scheduler.cache_size = 2
    scheduler.enable_prefix_caching = False
    scheduler.max_num_batched_tokens = 2048
    pipeline = genai.ContinuousBatchingPipeline(file, scheduler, "CPU", {"INFERENCE_NUM_THREADS": int(threads)})
    vocabulary = len(pipeline.get_tokenizer().get_vocab())
    asked = 0

    def run(case):
        global asked
        config = genai.GenerationConfig()
        config.max_new_tokens = case.tokens
        config.ignore_eos = True
        config.do_sample = False
        prompts = [openvino.Tensor(numpy.array([prompt], dtype=numpy.int64)) for prompt in case.prompts(vocabulary)]
        arrivals = Arrivals()
        handles = []
        for prompt in prompts:
            asked += 1
            handles.append(pipeline.add_request(asked, prompt, config))
        counts = [0] * len(handles)
        while pipeline.has_non_finished_requests():
            pipeline.step()
            for request, handle in enumerate(handles):
                while handle.can_read():
                    for output in handle.read().values():
                        counts[request] += len(output.generated_ids)
                    arrivals.came(request, counts[request])
        return arrivals.round(case)

    serve(answers, run)
