"""Writes a GGUF file for the bench: a model in another type, or a Llama of any size with random weights.

    make_gguf.py MODEL.gguf OUT.gguf --type BF16
    make_gguf.py MODEL.gguf OUT.gguf --type F16 --random 2048,8192,16,32,8

`--random HIDDEN,FEED_FORWARD,LAYERS,HEADS,KV_HEADS` takes only the tokenizer of MODEL.
"""

import argparse

import gguf
import numpy

TYPES = {
    "BF16": (gguf.GGMLQuantizationType.BF16, gguf.LlamaFileType.MOSTLY_BF16),
    "F16": (gguf.GGMLQuantizationType.F16, gguf.LlamaFileType.MOSTLY_F16),
}


def copied(reader):
    """The metadata of a file, without what the writer says itself."""
    for field in reader.fields.values():
        if not field.name.startswith("GGUF.") and field.name != "general.architecture":
            of = field.types[-1] if field.types[0] == gguf.GGUFValueType.ARRAY else None
            yield field.name, field.contents(), field.types[0], of


def tensors(reader):
    """Names and values (float32, rows of outputs) of a file's tensors."""
    for tensor in reader.tensors:
        yield tensor.name, gguf.dequantize(tensor.data, tensor.tensor_type).astype(numpy.float32)


def random_tensors(shape, vocabulary):
    """A Llama whose embedding is its head. Values keep activations in the usual range; nothing else is asked of them."""
    hidden, feed_forward, layers, heads, kv_heads = shape
    kv = hidden // heads * kv_heads
    random = numpy.random.default_rng(0)

    def matrix(rows, columns):
        values = random.standard_normal((rows, columns), dtype=numpy.float32)
        values *= columns**-0.5
        return values

    yield "token_embd.weight", matrix(vocabulary, hidden)
    yield "output_norm.weight", numpy.ones(hidden, numpy.float32)
    for layer in range(layers):
        block = f"blk.{layer}."
        yield block + "attn_norm.weight", numpy.ones(hidden, numpy.float32)
        yield block + "attn_q.weight", matrix(hidden, hidden)
        yield block + "attn_k.weight", matrix(kv, hidden)
        yield block + "attn_v.weight", matrix(kv, hidden)
        yield block + "attn_output.weight", matrix(hidden, hidden)
        yield block + "ffn_norm.weight", numpy.ones(hidden, numpy.float32)
        yield block + "ffn_gate.weight", matrix(feed_forward, hidden)
        yield block + "ffn_up.weight", matrix(feed_forward, hidden)
        yield block + "ffn_down.weight", matrix(hidden, feed_forward)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("out")
    parser.add_argument("--type", choices=TYPES, required=True)
    parser.add_argument("--random", type=lambda text: [int(number) for number in text.split(",")])
    args = parser.parse_args()
    reader = gguf.GGUFReader(args.model)
    kind, file_type = TYPES[args.type]
    writer = gguf.GGUFWriter(args.out, "llama")
    replaced = {"general.file_type": file_type}
    if args.random:
        hidden, feed_forward, layers, heads, kv_heads = args.random
        replaced |= {
            "general.name": f"Random Llama, {hidden} wide",
            "llama.block_count": layers,
            "llama.embedding_length": hidden,
            "llama.feed_forward_length": feed_forward,
            "llama.attention.head_count": heads,
            "llama.attention.head_count_kv": kv_heads,
            "llama.rope.dimension_count": hidden // heads,
            "llama.attention.key_length": hidden // heads,
            "llama.attention.value_length": hidden // heads,
        }
    vocabulary = None
    for name, value, value_type, of in copied(reader):
        if name == "tokenizer.ggml.tokens":
            vocabulary = len(value)
        writer.add_key_value(name, replaced.get(name, value), value_type, sub_type=of)
    values = random_tensors(args.random, vocabulary) if args.random else tensors(reader)
    for name, value in values:
        if value.ndim == 1:
            writer.add_tensor(name, value)
        else:
            writer.add_tensor(name, gguf.quantize(value, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


if __name__ == "__main__":
    main()
