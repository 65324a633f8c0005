// The functions that the runner calls (engines/native/common/row_program.h). Included at the end of a network's C++
// file, which defines the numbers, kBytes (for each column the bytes of an element; 0: shared by all rows),
// kWritten, and the blocks that run.
#define EXPORTED extern "C" __attribute__((visibility("default")))
#define RUN_BLOCKS(width)                                  \
  for (; end - row >= width::kRows; row += width::kRows) \
    width::block(columns, items, row, scratch, width::kRows);
#define RUN_ONE(width) \
  if (end - row == 1) return width::block(columns, items, row, scratch, 1);
#define RUN_FEW(width)                       \
  if (row < end && end - row <= width::kRows) \
    return few(width::block, width::kRows, columns, items, row, end, scratch);

// own_rows: how many rows of the block are not copies of the first.
typedef void Block(void *const *columns, const int64_t *items, int64_t row, char *arena, int own_rows);

// Runs a block on fewer rows than it has. It works on copies of these rows, filled up with copies of the first
// one, so that nothing is read or written beyond the end of a column.
static __attribute__((noinline)) void few(Block *block, int64_t rows, void *const *columns,
                                          const int64_t *items, int64_t row, int64_t end,
                                          char *scratch) {
  void **own = (void **)(scratch + kArena);
  char *at = (char *)(((uintptr_t)(own + kColumns) + 63) & ~(uintptr_t)63);
  for (int64_t c = 0; c < kColumns; ++c) {
    const int64_t size = kBytes[c], begin = row * size, length = (end - row) * size;
    own[c] = size == 0 ? columns[c] : at;
    if (size != 0 && !kWritten[c]) {
      const char *from = (const char *)columns[c] + begin;
      __builtin_memcpy(at, from, length);
      for (int64_t more = length; more < rows * size; more += size)
        __builtin_memcpy(at + more, from, size);
    }
    at += (rows * size + 63) & ~63;
  }
  block(own, items, 0, scratch, (int)(end - row));
  for (int64_t c = 0; c < kColumns; ++c) {
    const int64_t size = kBytes[c];
    if (kWritten[c])
      __builtin_memcpy((char *)columns[c] + row * size, own[c], (end - row) * size);
  }
}

// Computes the rows from `begin` to `end` - 1. `columns`: those of all arguments. `items`: the number of items
// of each jagged collection.
EXPORTED void soa_lanes_run(void *const *columns, const int64_t *items, int64_t begin, int64_t end,
                            char *scratch) {
  int64_t row = begin;
  WHOLE_BLOCKS
  LAST_ROWS
}

EXPORTED const struct {
  int64_t version, columns, scratch, rows, arguments;
  const char *kinds, *dtypes;
} soa_lanes_facts = {kAbi, kColumns, kScratch, kMostRows, kArguments, kKinds, kDtypes};
