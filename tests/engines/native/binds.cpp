// binds ARTIFACT: binds memory as stdin says, a line a case, and runs on it; tests/engines/native/test_bind.py writes the
// cases. Printed for each: "refused: WHY", or the checksum of all memory after the calls.
//
//   NAME KIND ROWS CAPACITY FIRST ADDRESS ... ; NAME ... | CALL | CALL
//
// KIND: buffer or columns, const-buffer or const-columns. An address is an offset in the arena, or "null"; that of a
// column is COLUMN=OFFSET,OFFSET. CAPACITY and FIRST may be "-". CALL: "call", "call 5", "call n=5,m=7", "resize 5",
// "resize 5 n". The line "collection NAME ROWS" makes memory of the library's own.
#include <cstdio>
#include <iostream>

#include "soa_model.hpp"

namespace {

constexpr std::size_t kArena = 1 << 18, kOffsets = kArena / 4 * 3;
alignas(4096) unsigned char arena[kArena];

// Every float32 in it is one that a model can work with; the last quarter is offsets, int64, of lists of three.
void fill() {
  std::uint32_t state = 1;
  for (std::size_t i = kOffsets; i < kArena; i += 8) {
    const auto at = static_cast<std::int64_t>((i - kOffsets) / 8 * 3 % 61);
    std::memcpy(arena + i, &at, 8);
  }
  for (std::size_t i = 0; i < kOffsets; i += 4) {
    state = state * 1664525u + 1013904223u;
    const float value = static_cast<float>(state >> 8) / (1 << 24);
    std::memcpy(arena + i, &value, 4);
  }
}

// The CRC-32 of the arena, as zlib computes it.
std::uint32_t checksum() {
  std::uint32_t sum = ~0u;
  for (const unsigned char byte : arena) {
    sum ^= byte;
    for (int bit = 0; bit < 8; ++bit) sum = (sum >> 1) ^ (sum & 1 ? 0xEDB88320u : 0);
  }
  return ~sum;
}

// The address of an offset in the arena.
void *address(const std::string &word) { return word == "null" ? nullptr : arena + std::stoll(word); }

std::vector<std::string> split(const std::string &text, char by) {
  std::vector<std::string> parts;
  std::istringstream stream(text);
  for (std::string part; std::getline(stream, part, by);) parts.push_back(part);
  return parts;
}

// Memory at `place`: an address, or those of columns. The last two may be "-", which leaves them to the library.
template <typename Place>
soa::Memory memory_at(const std::string &name, const Place &place, std::int64_t n, const std::string &room,
                      const std::string &first) {
  if (first != "-") return {name, place, n, room == "-" ? -1 : std::stoll(room), std::stoll(first)};
  return room == "-" ? soa::Memory(name, place, n) : soa::Memory(name, place, n, std::stoll(room));
}

// The memory of one collection, as in the comment at the top.
soa::Memory memory(const std::string &text) {
  std::istringstream words(text);
  std::string name, kind, n, room, first, word;
  words >> name >> kind >> n >> room >> first;
  const std::int64_t rows = std::stoll(n);
  if (kind == "buffer" || kind == "const-buffer") {
    words >> word;
    if (kind == "buffer") return memory_at(name, address(word), rows, room, first);
    return memory_at(name, static_cast<const void *>(address(word)), rows, room, first);
  }
  soa::Columns columns;
  soa::ConstColumns read_only;
  while (words >> word) {
    const std::size_t equals = word.find('=');
    const std::string column = word.substr(0, equals);
    for (const std::string &offset : split(word.substr(equals + 1), ',')) {
      columns[column].push_back(address(offset));
      read_only[column].push_back(address(offset));
    }
  }
  if (kind == "columns") return memory_at(name, columns, rows, room, first);
  return memory_at(name, read_only, rows, room, first);
}

// One CALL, as in the comment at the top.
void call(soa::Binding &binding, const std::string &text) {
  std::istringstream words(text);
  std::string verb, rows, dim;
  words >> verb >> rows >> dim;
  if (verb == "resize") return dim.empty() ? binding.resize(std::stoll(rows)) : binding.resize(std::stoll(rows), dim);
  if (rows.empty()) return binding();
  if (rows.find('=') == std::string::npos) return binding(std::stoll(rows));
  soa::Counts counts;
  for (const std::string &pair : split(rows, ',')) {
    counts[pair.substr(0, pair.find('='))] = std::stoll(pair.substr(pair.find('=') + 1));
  }
  binding(counts);
}

}  // namespace

int main(int, char **argv) {
  const soa::Model model = soa::Model::open(argv[1]);
  for (std::string line; std::getline(std::cin, line);) {
    fill();
    const std::vector<std::string> parts = split(line, '|'), words = split(line, ' ');
    try {
      if (words[0] == "collection") {
        const soa::Collection collection = model.collection(words[1], std::stoll(words[2]));
        std::printf("%lld\n", static_cast<long long>(collection.size()));
        std::fflush(stdout);
        continue;
      }
      std::vector<soa::Memory> bound;
      for (const std::string &text : split(parts[0], ';')) bound.push_back(memory(text));
      soa::Binding binding = model.bind(bound);
      for (std::size_t i = 1; i < parts.size(); ++i) call(binding, parts[i]);
      std::printf("%u\n", checksum());
    } catch (const soa::Error &error) {
      std::printf("refused: %s\n", error.what());
    }
    std::fflush(stdout);
  }
}
