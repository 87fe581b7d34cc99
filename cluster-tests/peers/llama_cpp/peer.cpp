// llama.cpp as a peer of `cargo xtask bench`: cases on standard input, a line of JSON for each (README.md beside).
//
// Native code against llama.h, so that neither Python nor a server's loop costs llama.cpp anything: prompts go in
// batches of 2,048 tokens as in its own llama-batched-bench, one step decodes a token of every request, and the next
// token is the largest logit's.

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <iostream>
#include <stdexcept>
#include <string>
#include <vector>

#include "llama.h"

namespace {

using Clock = std::chrono::steady_clock;

constexpr uint32_t BATCH = 2048;
constexpr uint32_t MICRO_BATCH = 512;

struct Case {
    int prompt_tokens = 0;
    int tokens = 0;
    int at_once = 1;
};

Case parse(const std::string & line) {
    Case parsed;
    const int found = std::sscanf(line.c_str(), "%d+%dx%d", &parsed.prompt_tokens, &parsed.tokens, &parsed.at_once);
    if (found < 2 || parsed.prompt_tokens < 1 || parsed.tokens < 1 || parsed.at_once < 1) {
        throw std::runtime_error("no case: " + line);
    }
    return parsed;
}

double seconds(Clock::time_point since) {
    return std::chrono::duration<double>(Clock::now() - since).count();
}

long long peak_rss_bytes() {
    std::ifstream status("/proc/self/status");
    for (std::string line; std::getline(status, line);) {
        if (line.rfind("VmHWM:", 0) == 0) {
            return std::atoll(line.c_str() + 6) * 1024;
        }
    }
    return 0;
}

class Peer {
public:
    Peer(const char * path, int threads) : threads(threads) {
        llama_backend_init();
        model = llama_model_load_from_file(path, llama_model_default_params());
        if (model == nullptr) {
            throw std::runtime_error(std::string("cannot load ") + path);
        }
        vocabulary = llama_vocab_n_tokens(llama_model_get_vocab(model));
    }

    void answer(const Case & asked) {
        provide(asked);
        llama_memory_clear(llama_get_memory(context), false);
        llama_batch batch = llama_batch_init(BATCH, 0, 1);
        std::vector<llama_token> next(asked.at_once);
        std::vector<double> first(asked.at_once);
        std::vector<int> row_of(asked.at_once, -1);

        const auto begun = Clock::now();
        const auto compute = [&] {
            if (llama_decode(context, batch) != 0) {
                throw std::runtime_error("llama_decode failed");
            }
            for (int request = 0; request < asked.at_once; request++) {
                if (row_of[request] >= 0) {
                    const float * logits = llama_get_logits_ith(context, row_of[request]);
                    next[request] = llama_token(std::max_element(logits, logits + vocabulary) - logits);
                    row_of[request] = -1;
                }
            }
            batch.n_tokens = 0;
        };
        const auto add = [&](llama_token token, int position, int request, bool wanted) {
            const int row = batch.n_tokens++;
            batch.token[row] = token;
            batch.pos[row] = position;
            batch.n_seq_id[row] = 1;
            batch.seq_id[row][0] = request;
            batch.logits[row] = wanted;
            if (wanted) {
                row_of[request] = row;
            }
        };

        std::vector<int> in_batch;
        const auto prefill = [&] {
            compute();
            for (int request : in_batch) {
                first[request] = seconds(begun);
            }
            in_batch.clear();
        };
        for (int request = 0; request < asked.at_once; request++) {
            for (int position = 0; position < asked.prompt_tokens; position++) {
                const bool last = position + 1 == asked.prompt_tokens;
                add(llama_token(std::rand() % vocabulary), position, request, last);
                if (last) {
                    in_batch.push_back(request);
                }
                if (batch.n_tokens == int(BATCH)) {
                    prefill();
                }
            }
        }
        if (batch.n_tokens > 0) {
            prefill();
        }
        for (int token = 1; token < asked.tokens; token++) {
            for (int request = 0; request < asked.at_once; request++) {
                add(next[request], asked.prompt_tokens + token - 1, request, true);
            }
            compute();
        }
        report(asked, first, seconds(begun));
        llama_batch_free(batch);
    }

private:
    // A context with room for the case. Making one is no part of what is measured.
    void provide(const Case & asked) {
        const uint32_t length = uint32_t(asked.prompt_tokens + asked.tokens);
        if (context != nullptr && length <= room && uint32_t(asked.at_once) == sequences) {
            return;
        }
        if (context != nullptr) {
            llama_free(context);
        }
        sequences = uint32_t(asked.at_once);
        room = (length + 255) / 256 * 256;
        llama_context_params params = llama_context_default_params();
        params.n_ctx = room * sequences;
        params.n_batch = BATCH;
        params.n_ubatch = MICRO_BATCH;
        params.n_seq_max = sequences;
        params.n_threads = threads;
        params.n_threads_batch = threads;
        params.flash_attn_type = LLAMA_FLASH_ATTN_TYPE_ENABLED;
        params.kv_unified = false;
        context = llama_init_from_model(model, params);
        if (context == nullptr) {
            throw std::runtime_error("cannot make a context");
        }
    }

    void report(const Case & asked, std::vector<double> first, double end) const {
        std::sort(first.begin(), first.end());
        const double last_first = first.back();
        double decode = 0;
        for (double begun : first) {
            decode += (asked.tokens - 1) / std::max(end - begun, 1e-9);
        }
        const double prefilled = double(asked.prompt_tokens) * asked.at_once;
        std::printf("{\"round\": {\"first_token_s\": %.6f, \"prefill_tokens_per_s\": %.3f, ",
            first[first.size() / 2], prefilled / last_first);
        if (asked.tokens > 1) {
            std::printf("\"decode_tokens_per_s\": %.3f, ", decode);
        } else {
            std::printf("\"decode_tokens_per_s\": null, ");
        }
        std::printf("\"end_to_end_tokens_per_s\": %.3f}, \"peak_rss_bytes\": %lld}\n",
            double(asked.tokens) * asked.at_once / end, peak_rss_bytes());
        std::fflush(stdout);
    }

    int threads;
    int vocabulary = 0;
    llama_model * model = nullptr;
    llama_context * context = nullptr;
    uint32_t room = 0;
    uint32_t sequences = 0;
};

} // namespace

int main(int argc, char ** argv) {
    if (argc != 3) {
        std::fprintf(stderr, "usage: %s MODEL.gguf THREADS\n", argv[0]);
        return 2;
    }
    llama_log_set([](ggml_log_level level, const char * text, void *) {
        if (level >= GGML_LOG_LEVEL_ERROR) {
            std::fputs(text, stderr);
        }
    }, nullptr);
    try {
        Peer peer(argv[1], std::atoi(argv[2]));
        std::printf("ready\n");
        std::fflush(stdout);
        for (std::string line; std::getline(std::cin, line);) {
            peer.answer(parse(line));
        }
    } catch (const std::exception & error) {
        std::fprintf(stderr, "error: %s\n", error.what());
        return 1;
    }
    return 0;
}
