"""The model runner: arena, pages, slots, tables, batch building, sampling, sleep."""
