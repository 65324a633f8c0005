// Artifacts of the engine `lanes` for CPUs: one function on columns, which needs no library.
#ifndef SOA_ROW_PROGRAM_H
#define SOA_ROW_PROGRAM_H

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <new>
#include <string>
#include <vector>

#include "opening.h"
#include "threads.h"

namespace soa_runner {

// The facts in a library; engines/lanes/planning/source_file.py writes them.
struct RowFacts {
  int64_t version, columns, scratch, rows, arguments;
  const char *kinds;  // a letter for each argument: n carries the rows, i items, c column, m matrix, - the same for all
  const char *dtypes;  // a letter for each argument: the index of its dtype in kDtypes, counted from 'a'
};

// Memory of a thread for intermediate values. Its size is the largest that an artifact has asked for.
class Scratch {
 public:
  // At least `bytes` bytes, aligned to 64, which belong to the calling thread until its next call of this.
  static char *of_this_thread(int64_t bytes) {
    static thread_local Scratch own;
    if (own.bytes_ < bytes) {
      std::free(own.memory_);
      own.bytes_ = 0;
      own.memory_ = static_cast<char *>(std::aligned_alloc(64, static_cast<size_t>(bytes + 63) / 64 * 64));
      if (own.memory_ == nullptr) throw std::bad_alloc();
      own.bytes_ = bytes;
    }
    return own.memory_;
  }
  ~Scratch() { std::free(memory_); }

 private:
  char *memory_ = nullptr;
  int64_t bytes_ = 0;
};

class RowProgram : public Artifact {
 public:
  // The function of a library: computes the rows from `begin` to before `end`. `items`: the numbers of items.
  using Run = void (*)(void *const *columns, const int64_t *items, int64_t begin, int64_t end, char *scratch);

  static constexpr int64_t kVersion = 1;

  // The program in a library; null if it is no library of `lanes`.
  static std::unique_ptr<RowProgram> of(void *handle, const char *device) {
    const auto *facts = static_cast<const RowFacts *>(dlsym(handle, "soa_lanes_facts"));
    if (facts == nullptr) return nullptr;
    if (facts->version != kVersion) {
      fail(SOA_OPEN_FAILED, "the artifact is of version %lld of its interface, this runner of %lld: build it again",
           static_cast<long long>(facts->version), static_cast<long long>(kVersion));
    }
    if (std::strncmp(device, "cpu", 3) != 0) fail(SOA_OPEN_FAILED, "the artifact is for CPUs, found %s", device);
    return std::unique_ptr<RowProgram>(new RowProgram(*facts, find(handle, "soa_lanes_run")));
  }

  std::unique_ptr<Bound> bind(const std::vector<Memory> &memory) override;

  const RowFacts facts;
  const Run run;
  mutable std::atomic<double> row_us{0};  // how long a row took in the last run that measured it

 private:
  RowProgram(const RowFacts &library_facts, Run function) : Artifact(false), facts(library_facts), run(function) {
    inputs = static_cast<size_t>(facts.arguments);
  }
};

// The columns of all arguments, in the form that the function takes.
class ColumnArguments : public Bound {
 public:
  ColumnArguments(const RowFacts &facts, const std::vector<Memory> &memory)
      : facts_(facts),
        first_(memory.size()),
        columns_(static_cast<size_t>(facts.columns)),
        items_(static_cast<size_t>(std::count(facts.kinds, facts.kinds + memory.size(), 'i'))) {
    size_t next = 0;
    for (size_t i = 0; i < memory.size(); ++i) {
      first_[i] = next;
      next += width(i, memory[i]);
      if (next > columns_.size()) break;
    }
    if (next != columns_.size()) {
      fail(SOA_BAD_ARGUMENT, "the arguments have %zu columns or more, the artifact takes %zu", next, columns_.size());
    }
    for (size_t i = 0; i < memory.size(); ++i) require_fits(i, memory[i]);
    for (size_t i = 0; i < memory.size(); ++i) put(i, memory[i]);
  }

  void replace(const std::vector<size_t> &indices, const std::vector<Memory> &memory) override {
    for (size_t k = 0; k < indices.size(); ++k) require_fits(indices[k], memory[k]);
    for (size_t k = 0; k < indices.size(); ++k) put(indices[k], memory[k]);
  }

 protected:
  const RowFacts &facts() const { return facts_; }

  // True for an argument without columns, whose size is a number of rows or items.
  bool carries(size_t i) const { return std::strchr("ni", facts().kinds[i]) != nullptr; }

  // The number of columns of an argument.
  size_t width(size_t i, const Memory &memory) const {
    if (carries(i)) return 0;
    return facts().kinds[i] == 'm' ? static_cast<size_t>(memory.sizes[0]) : 1;
  }

  // Fails unless an argument has the kind, the dtype and the number of columns that the artifact takes.
  void require_fits(size_t i, const Memory &memory) const {
    const char kind = facts().kinds[i];
    const size_t dims = carries(i) || kind == 'm' ? 2 : 1;
    const size_t dtype = static_cast<size_t>(facts().dtypes[i] - 'a');
    const size_t end = i + 1 < first_.size() ? first_[i + 1] : columns_.size();
    const bool fits = kind != 'm' || static_cast<size_t>(memory.sizes[0]) == end - first_[i];
    if (memory.ndim != dims || memory.type != dtype || !fits) {
      fail(SOA_BAD_ARGUMENT, "argument %zu: it is not the %s %s that the artifact takes", i,
           dtype < kUnknown ? kDtypes[dtype].name : "?", kind == 'm' ? "matrix" : carries(i) ? "carrier" : "column");
    }
  }

  // Stores an argument's number of rows or items, or the addresses of its columns.
  void put(size_t i, const Memory &memory) {
    const char kind = facts().kinds[i];
    if (kind == 'n') rows_ = memory.sizes[0];
    if (kind == 'i') {
      const auto before = std::count(facts().kinds, facts().kinds + i, 'i');
      items_[static_cast<size_t>(before)] = memory.sizes[0];
    }
    const auto count = static_cast<int64_t>(width(i, memory));
    const auto pitch = static_cast<uint64_t>(kind == 'm' ? memory.sizes[1] : 0) * kDtypes[memory.type].bytes;
    for (int64_t f = 0; f < count; ++f) {
      columns_[first_[i] + static_cast<size_t>(f)] = memory.data + static_cast<uint64_t>(f) * pitch;
    }
  }

  const RowFacts &facts_;
  std::vector<size_t> first_;  // the index of the first column of each argument
  std::vector<void *> columns_;
  int64_t rows_ = 0;
  std::vector<int64_t> items_;  // the number of items of each jagged collection
};

class RowArguments : public ColumnArguments {
 public:
  RowArguments(const RowProgram &program, const std::vector<Memory> &memory)
      : ColumnArguments(program.facts, memory), program_(program) {}

  // Runs in this thread until it is known that the rows which are left are work for more threads.
  void run(const Tiling &tiling, int threads, void *) override {
    threads = std::max(threads, tiling.threads);
    if (threads < 2 || little()) return run_rows(0, rows_);
    const auto begun = Clock::now();
    const auto elapsed_us = [&] { return std::chrono::duration<double, std::micro>(Clock::now() - begun).count(); };
    int64_t done = 0;
    int sharing = sharers(rows_, threads);
    for (int64_t size = facts().rows; sharing < 2 && rows_ - done > size; size *= 2) {
      run_rows(done, done + size);
      done += size;
      const double us = elapsed_us();
      program_.row_us = us / static_cast<double>(done);
      if (us >= kShareUs) sharing = sharers(rows_ - done, threads);
    }
    if (sharing < 2) return run_rows(done, rows_);
    // Pieces of whole blocks, several for each thread: a thread that begins late or is slow takes fewer.
    const int64_t blocks = (rows_ - done) / facts().rows / (kPieces * sharing);
    in_pieces(rows_ - done, std::max<int64_t>(1, blocks) * facts().rows, sharing,
              [&](int64_t begin, int64_t end) { run_rows(done + begin, done + end); });
    program_.row_us = elapsed_us() * sharing / static_cast<double>(rows_);
  }

 private:
  using Clock = std::chrono::steady_clock;

  // The least work of a thread. A helper begins 5 to 50 us after it is woken (benchmarks/speed/threads.py).
  static constexpr double kShareUs = 50;
  static constexpr int64_t kPieces = 16;  // for each thread

  // Whether the rows are known to be too little work for two threads. A jagged collection may have few items in one
  // run and many in the next.
  bool little() const { return items_.empty() && program_.row_us > 0 && sharers(rows_, 2) < 2; }

  // How many threads can have kShareUs of work each, by the time that a row took last, and at least one block each.
  int sharers(int64_t rows, int threads) const {
    const double shares = std::min(static_cast<double>(rows) * program_.row_us / kShareUs, static_cast<double>(threads));
    const int64_t blocks = (rows + facts().rows - 1) / facts().rows;
    return static_cast<int>(std::min<int64_t>(static_cast<int64_t>(shares), blocks));
  }

  // Runs the rows from `begin` to before `end`. Cuts between blocks change no bit of the results.
  void run_rows(int64_t begin, int64_t end) const {
    program_.run(columns_.data(), items_.data(), begin, end, Scratch::of_this_thread(facts().scratch));
  }

  const RowProgram &program_;
};

inline std::unique_ptr<Bound> RowProgram::bind(const std::vector<Memory> &memory) {
  return std::make_unique<RowArguments>(*this, memory);
}

}  // namespace soa_runner

#endif
