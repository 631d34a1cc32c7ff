"""Wire formats: each turns bodies into calls and answers into bytes, without I/O."""
