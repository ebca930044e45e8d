"""Arguments that transformers hands to every attention."""

# What transformers hands through to every attention, and what no result of attention depends on: positions are in q, k
# and the mask, the longest sequence is in cu_seq_lens.
HARMLESS = {
    "position_ids", "max_length_q", "max_length_k", "num_items_in_batch", "output_attentions", "output_hidden_states",
    "output_router_logits", "return_dict", "use_cache", "logits_to_keep",
}  # fmt: skip
