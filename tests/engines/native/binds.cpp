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

std::uint32_t checksum() {
  std::uint32_t sum = ~0u;
  for (const unsigned char byte : arena) {
    sum ^= byte;
    for (int bit = 0; bit < 8; ++bit) sum = (sum >> 1) ^ (sum & 1 ? 0xEDB88320u : 0);
  }
  return ~sum;
}

void *address(const std::string &word) { return word == "null" ? nullptr : arena + std::stoll(word); }

std::vector<std::string> split(const std::string &text, char by) {
  std::vector<std::string> parts;
  std::istringstream stream(text);
  for (std::string part; std::getline(stream, part, by);) parts.push_back(part);
  return parts;
}

// The last two may be left out, which leaves them to the library.
template <typename Where>
soa::Memory made(const std::string &name, const Where &where, std::int64_t n, const std::string &room, const std::string &first) {
  if (first != "-") return {name, where, n, room == "-" ? -1 : std::stoll(room), std::stoll(first)};
  return room == "-" ? soa::Memory(name, where, n) : soa::Memory(name, where, n, std::stoll(room));
}

soa::Memory memory(const std::string &text) {
  std::istringstream words(text);
  std::string name, kind, n, room, first, word;
  words >> name >> kind >> n >> room >> first;
  const std::int64_t rows = std::stoll(n);
  if (kind == "buffer" || kind == "const-buffer") {
    words >> word;
    if (kind == "buffer") return made(name, address(word), rows, room, first);
    return made(name, static_cast<const void *>(address(word)), rows, room, first);
  }
  soa::Columns columns;
  soa::ConstColumns read_only;
  while (words >> word) {
    const std::size_t equals = word.find('=');
    for (const std::string &each : split(word.substr(equals + 1), ',')) {
      columns[word.substr(0, equals)].push_back(address(each));
      read_only[word.substr(0, equals)].push_back(address(each));
    }
  }
  if (kind == "columns") return made(name, columns, rows, room, first);
  return made(name, read_only, rows, room, first);
}

void call(soa::Binding &binding, const std::string &text) {
  std::istringstream words(text);
  std::string what, rows, dim;
  words >> what >> rows >> dim;
  if (what == "resize") return dim.empty() ? binding.resize(std::stoll(rows)) : binding.resize(std::stoll(rows), dim);
  if (rows.empty()) return binding();
  if (rows.find('=') == std::string::npos) return binding(std::stoll(rows));
  soa::Counts counts;
  for (const std::string &each : split(rows, ',')) {
    counts[each.substr(0, each.find('='))] = std::stoll(each.substr(each.find('=') + 1));
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
        const soa::Collection found = model.collection(words[1], std::stoll(words[2]));
        std::printf("%lld\n", static_cast<long long>(found.size()));
        std::fflush(stdout);
        continue;
      }
      std::vector<soa::Memory> bound;
      for (const std::string &each : split(parts[0], ';')) bound.push_back(memory(each));
      soa::Binding binding = model.bind(bound);
      for (std::size_t i = 1; i < parts.size(); ++i) call(binding, parts[i]);
      std::printf("%u\n", checksum());
    } catch (const soa::Error &error) {
      std::printf("refused: %s\n", error.what());
    }
    std::fflush(stdout);
  }
}
