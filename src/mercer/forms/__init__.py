"""How an attention is computed: dense, chunked and recurrent forms that agree with the reference."""
