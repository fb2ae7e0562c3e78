"""Small real weights in the forms that the engines want; run by install.py inside a venv that has gguf and numpy.

    weights.py f16 IN.gguf OUT.gguf     the same weights, dequantized: a target that its quantized self drafts well for
    weights.py stranger OUT.gguf        a random model of another vocabulary: a draft model that no target can use
    weights.py hf IN.gguf OUT           the same weights as safetensors, with config and tokenizer, for vLLM and SGLang
"""
import importlib
import json
import pathlib
import struct
import sys

gguf = importlib.import_module("gguf")     # there only inside the venv: the tests themselves need nothing
np = importlib.import_module("numpy")

CONTROL, USER_DEFINED = 3, 4    # token types of a GGUF


def dequantized(tensor):
    """A tensor as float32, in the shape of its matrix."""
    return gguf.quants.dequantize(tensor.data, tensor.tensor_type).astype(np.float32)


def f16(source, target):
    """Write the weights of `source` as F16, its norms as F32, and all its facts as they are."""
    reader = gguf.GGUFReader(source)
    writer = gguf.GGUFWriter(target, reader.fields["general.architecture"].contents())
    for field in reader.fields.values():
        if field.name.startswith("GGUF.") or field.name in ("general.architecture", "general.file_type"):
            continue
        writer.add_key_value(field.name, field.contents(), field.types[0], field.types[-1] if len(field.types) > 1 else None)
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_F16)
    for tensor in reader.tensors:
        values = dequantized(tensor)
        writer.add_tensor(tensor.name, values if values.ndim == 1 else values.astype(np.float16))
    finish(writer)


def stranger(target):
    """Write a random two-layer llama whose vocabulary is of another kind (SentencePiece, 320 tokens)."""
    width, hidden, heads, vocabulary = 64, 128, 4, 320
    random = np.random.default_rng(0)
    writer = gguf.GGUFWriter(target, "llama")
    writer.add_name("a model of another vocabulary")
    writer.add_context_length(2048)
    writer.add_embedding_length(width)
    writer.add_block_count(2)
    writer.add_feed_forward_length(hidden)
    writer.add_head_count(heads)
    writer.add_rope_dimension_count(width // heads)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(vocabulary)
    writer.add_file_type(gguf.LlamaFileType.ALL_F32)
    byte_tokens = [f"<0x{byte:02X}>" for byte in range(256)]
    words = ["<unk>", "<s>", "</s>"] + byte_tokens + [f"▁{number}" for number in range(vocabulary - 259)]
    writer.add_tokenizer_model("llama")
    writer.add_token_list(words)
    writer.add_token_scores([0.0] * vocabulary)
    writer.add_token_types([2, 3, 3] + [6] * 256 + [1] * (vocabulary - 259))
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    shapes = {"token_embd": (vocabulary, width), "output_norm": (width,), "output": (vocabulary, width)}
    for block in range(2):
        shapes.update({f"blk.{block}.{name}": shape for name, shape in (
            ("attn_norm", (width,)), ("attn_q", (width, width)), ("attn_k", (width, width)), ("attn_v", (width, width)),
            ("attn_output", (width, width)), ("ffn_norm", (width,)), ("ffn_gate", (hidden, width)), ("ffn_up", (hidden, width)),
            ("ffn_down", (width, hidden)))})
    for name, shape in shapes.items():
        values = np.ones(shape) if len(shape) == 1 else random.normal(0, 0.05, shape)
        writer.add_tensor(name + ".weight", values.astype(np.float32))
    finish(writer)


def finish(writer):
    """Have everything written down."""
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def hf(source, folder):
    """Write config.json, model.safetensors (bfloat16), tokenizer.json and its configuration."""
    reader = gguf.GGUFReader(source)
    facts = {field.name: field.contents() for field in reader.fields.values()}
    folder = pathlib.Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    heads, kv_heads = facts["llama.attention.head_count"], facts["llama.attention.head_count_kv"]
    write_safetensors(folder / "model.safetensors", {
        hf_name(tensor.name): hf_matrix(tensor.name, dequantized(tensor), heads, kv_heads) for tensor in reader.tensors})
    write_json(folder / "config.json", {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "torch_dtype": "bfloat16", "hidden_act": "silu",
        "hidden_size": facts["llama.embedding_length"], "intermediate_size": facts["llama.feed_forward_length"],
        "num_hidden_layers": facts["llama.block_count"], "num_attention_heads": heads, "num_key_value_heads": kv_heads,
        "head_dim": facts["llama.rope.dimension_count"], "rms_norm_eps": facts["llama.attention.layer_norm_rms_epsilon"],
        "rope_theta": facts["llama.rope.freq_base"], "max_position_embeddings": facts["llama.context_length"],
        "vocab_size": len(facts["tokenizer.ggml.tokens"]), "tie_word_embeddings": True, "attention_bias": False, "mlp_bias": False,
        "bos_token_id": facts["tokenizer.ggml.bos_token_id"], "eos_token_id": facts["tokenizer.ggml.eos_token_id"],
        "pad_token_id": facts["tokenizer.ggml.padding_token_id"]})
    write_tokenizer(folder, facts)


_NAMES = {"attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm", "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj",
          "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj", "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj",
          "ffn_down": "mlp.down_proj"}


def hf_name(name):
    """What transformers calls a tensor of a llama GGUF."""
    whole = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight"}
    if name in whole:
        return whole[name]
    _, block, kind, _ = name.split(".")
    return f"model.layers.{block}.{_NAMES[kind]}.weight"


def hf_matrix(name, values, heads, kv_heads):
    """GGUF interleaves the rotary halves of each head's queries and keys; transformers keeps them one after the other."""
    count = heads if ".attn_q." in name else kv_heads if ".attn_k." in name else 0
    if not count:
        return values
    return values.reshape(count, values.shape[0] // count // 2, 2, values.shape[1]).swapaxes(1, 2).reshape(values.shape)


def bfloat16(values):
    """The upper halves of float32, rounded to the nearest, as bytes."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype("<u2").tobytes()


def write_safetensors(path, matrices):
    """A safetensors file: the header's length, the header, the bytes."""
    header, offset = {"__metadata__": {"format": "pt"}}, 0
    for name, values in matrices.items():
        header[name] = {"dtype": "BF16", "shape": list(values.shape), "data_offsets": [offset, offset + 2 * values.size]}
        offset += 2 * values.size
    head = json.dumps(header).encode()
    head += b" " * (-len(head) % 8)
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(head)) + head)
        for values in matrices.values():
            file.write(bfloat16(values))


def write_tokenizer(folder, facts):
    """tokenizer.json of a byte-level BPE whose digits stand alone (the GGUF's pre-tokenizer "smollm"), and the chat template."""
    tokens, types = facts["tokenizer.ggml.tokens"], facts["tokenizer.ggml.token_type"]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    write_json(folder / "tokenizer.json", {
        "version": "1.0", "truncation": None, "padding": None, "normalizer": None, "post_processor": None, "decoder": byte_level,
        "added_tokens": [{"id": number, "content": token, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False,
                          "special": types[number] == CONTROL}
                         for number, token in enumerate(tokens) if types[number] in (CONTROL, USER_DEFINED)],
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [{"type": "Digits", "individual_digits": True}, byte_level]},
        "model": {"type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None, "end_of_word_suffix": None,
                  "fuse_unk": False, "byte_fallback": False, "ignore_merges": False,
                  "vocab": {token: number for number, token in enumerate(tokens)},
                  "merges": [merge.split(" ") for merge in facts["tokenizer.ggml.merges"]]}})
    special = {name: tokens[facts[f"tokenizer.ggml.{key}_token_id"]]
               for name, key in (("bos_token", "bos"), ("eos_token", "eos"), ("unk_token", "unknown"), ("pad_token", "padding"))}
    write_json(folder / "tokenizer_config.json", {**special, "tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False,
                                                  "model_max_length": facts["llama.context_length"],
                                                  "chat_template": facts["tokenizer.chat_template"]})


def write_json(path, value):
    """A JSON file."""
    path.write_text(json.dumps(value, ensure_ascii=False, indent=1), encoding="utf-8")


if __name__ == "__main__":
    {"f16": f16, "stranger": stranger, "hf": hf}[sys.argv[1]](*sys.argv[2:])
