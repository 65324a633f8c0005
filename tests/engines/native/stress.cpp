// The native runner from many threads at once and on bad input, without Python: for sanitizers.
//
//   stress LIBRARY ROUNDS
//
// LIBRARY is the artifact of tests/models/mlps.py's PointwiseFirst with its files beside it: a row
// carrier, six float32 columns in, three out. Every output is compared, bit for bit, with a serial
// run. Prints one line of counts; 0 if all is as soa_runner.h promises, 1 if not.
#include <unistd.h>

#include <atomic>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <functional>
#include <iterator>
#include <map>
#include <string>
#include <thread>
#include <vector>

#include "soa_runner.h"

namespace {

namespace fs = std::filesystem;

constexpr int64_t kInputs = 6, kOutputs = 3, kCapacity = 320;  // pitches are multiples of 128 bytes
const int64_t kRows[] = {0, 1, 2, 5, 31, 32, 33, 100, 257, 320};
constexpr uint32_t kCanary = 0xdeadbeef;

std::atomic<size_t> runs{0}, busy{0}, closed{0}, refused{0}, wrong{0};

void expect(bool fine, const char *format, ...) {
  if (fine) return;
  ++wrong;
  va_list arguments;
  va_start(arguments, format);
  std::fputs("stress: ", stdout);
  std::vprintf(format, arguments);
  std::fputs("\n", stdout);
  va_end(arguments);
}

// Event memory as a caller owns it: input columns with a pattern, output columns with a canary.
struct Event {
  explicit Event(size_t seed = 0)
      : in(static_cast<size_t>(kInputs * kCapacity)), out(static_cast<size_t>(kOutputs * kCapacity)) {
    for (size_t i = 0; i < in.size(); ++i) in[i] = static_cast<float>((7 * i + 13 * seed) % 101) / 50 - 1;
    clear();
  }
  void clear() { out.assign(out.size(), kCanary); }
  std::vector<soa_tensor> arguments(int64_t n) {
    return {{nullptr, "float32", 2, {n, 0}},
            {in.data(), "float32", 2, {kInputs, kCapacity}},
            {out.data(), "float32", 2, {kOutputs, kCapacity}}};
  }
  std::vector<float> in;
  std::vector<uint32_t> out;  // the outputs' bits
};

using Expected = std::map<std::pair<size_t, int64_t>, std::vector<uint32_t>>;  // by seed and n
constexpr size_t kSeeds = 4;

soa_model *open(const std::string &library, int instances = 4, int threads = 1) {
  char message[512] = "";
  soa_model *model = nullptr;
  const int code = soa_model_open(library.c_str(), "cpu", fs::path(library).parent_path().c_str(),
                                  instances, threads, &model, message, sizeof message);
  expect(code == SOA_OK && model != nullptr, "open: %d %s", code, message);
  if (model == nullptr) std::exit(1);
  return model;
}

soa_call *prepare(soa_model *model, Event &event, int64_t n) {
  char message[512] = "";
  soa_call *call = nullptr;
  const auto arguments = event.arguments(n);
  const int code =
      soa_call_create(model, arguments.data(), arguments.size(), &call, message, sizeof message);
  expect(code == SOA_OK && call != nullptr, "create: %d %s", code, message);
  if (call == nullptr) std::exit(1);
  return call;
}

void set_rows(soa_call *call, int64_t n) {
  const soa_tensor carrier{nullptr, "float32", 2, {n, 0}};
  expect(soa_call_set(call, 0, &carrier, nullptr, 0) == SOA_OK, "set n = %lld", static_cast<long long>(n));
}

int run(soa_call *call) {
  char message[256] = "";
  const int code = soa_call_run(call, nullptr, message, sizeof message);
  ++(code == SOA_OK ? runs : code == SOA_BUSY ? busy : code == SOA_CLOSED ? closed : wrong);
  expect(code == SOA_OK || message[0] != '\0', "code %d without a message", code);
  return code;
}

void run_and_compare(soa_call *call, Event &event, const std::vector<uint32_t> &expected, const char *where) {
  event.clear();
  const int code = run(call);
  expect(code == SOA_OK, "%s: code %d", where, code);
  expect(event.out == expected, "%s: other bits than the serial run", where);
}

void on_threads(int count, const std::function<void(int)> &work) {
  std::atomic<int> ready{0};
  std::vector<std::thread> threads;
  for (int t = 0; t < count; ++t) {
    threads.emplace_back([&, t] {
      for (++ready; ready < count;) std::this_thread::yield();
      work(t);
    });
  }
  for (std::thread &thread : threads) thread.join();
}

// The answers of one instance in one thread, which must write n rows and nothing behind them.
Expected serial(const std::string &library) {
  soa_model *model = open(library, 1);
  expect(soa_model_arguments(model) == 3, "arguments");
  Expected expected;
  for (size_t seed = 0; seed < kSeeds; ++seed) {
    Event event(seed);
    soa_call *call = prepare(model, event, 0);
    for (const int64_t n : kRows) {
      event.clear();
      set_rows(call, n);
      expect(run(call) == SOA_OK, "serial");
      for (int64_t column = 0; column < kOutputs; ++column) {
        for (int64_t i = 0; i < kCapacity; ++i) {
          const uint32_t bits = event.out[static_cast<size_t>(column * kCapacity + i)];
          expect((bits == kCanary) == (i >= n), "row %lld of %lld", static_cast<long long>(i),
                 static_cast<long long>(n));
        }
      }
      expected[{seed, n}] = event.out;
    }
    soa_call_delete(call);
  }
  soa_model_close(model);
  return expected;
}

// More threads than instances, each with a call of its own, n changing from run to run.
void calls_of_their_own(soa_model *model, const Expected &expected, size_t rounds) {
  on_threads(8, [&](int t) {
    const size_t seed = static_cast<size_t>(t) % kSeeds;
    Event event(seed);
    soa_call *call = prepare(model, event, 0);
    for (size_t round = 0; round < rounds; ++round) {
      const int64_t n = kRows[(round * 7 + static_cast<size_t>(t)) % std::size(kRows)];
      set_rows(call, n);
      run_and_compare(call, event, expected.at({seed, n}), "own call");
    }
    soa_call_delete(call);
  });
}

// Threads share one call, and one of them changes its arguments: each is done whole, or refused as busy.
void one_call_for_all(soa_model *model, const Expected &expected, size_t rounds) {
  Event event, other;
  soa_call *call = prepare(model, event, 257);
  std::atomic<size_t> done{0};
  on_threads(6, [&](int t) {
    for (size_t round = 0; round < rounds; ++round) {
      if (t == 0) {  // another n and other memory meanwhile: refused, or done between two runs
        const int64_t n = round % 2 == 0 ? 257 : 33;
        const auto arguments = (round % 3 == 0 ? other : event).arguments(n);
        for (size_t i = 0; i < arguments.size(); ++i) {
          const int code = soa_call_set(call, i, &arguments[i], nullptr, 0);
          expect(code == SOA_OK || code == SOA_BUSY, "set: code %d", code);
          if (code == SOA_BUSY) ++busy;
        }
      } else {
        const int code = run(call);
        expect(code == SOA_OK || code == SOA_BUSY, "same call: code %d", code);
        if (code == SOA_OK) ++done;
      }
    }
  });
  expect(done > 0, "no run of the shared call got through");
  const auto arguments = event.arguments(257);
  for (size_t i = 0; i < arguments.size(); ++i) {
    expect(soa_call_set(call, i, &arguments[i], nullptr, 0) == SOA_OK, "set afterwards");
  }
  run_and_compare(call, event, expected.at({0, 257}), "shared call afterwards");
  soa_call_delete(call);
}

// 64 calls of two models in one soa_run_many, from two threads.
void many_at_once(soa_model *model, soa_model *second, const Expected &expected, size_t rounds) {
  on_threads(2, [&](int t) {
    std::vector<Event> events;
    std::vector<soa_call *> calls;
    for (size_t i = 0; i < 64; ++i) events.emplace_back(i % kSeeds);
    for (size_t i = 0; i < 64; ++i) {
      calls.push_back(prepare(i % 2 == 0 ? model : second, events[i], kRows[i % std::size(kRows)]));
    }
    for (size_t round = 0; round < rounds; ++round) {
      for (Event &event : events) event.clear();
      char message[256] = "";
      size_t failed = 0;
      const int code = soa_run_many(calls.data(), calls.size(), 3 + t, nullptr, &failed, message,
                                    sizeof message);
      expect(code == SOA_OK && failed == calls.size(), "run_many: %d %s", code, message);
      runs += calls.size();
      for (size_t i = 0; i < events.size(); ++i) {
        expect(events[i].out == expected.at({i % kSeeds, kRows[i % std::size(kRows)]}), "run_many: call %zu", i);
      }
    }
    for (soa_call *call : calls) soa_call_delete(call);
  });
}

// Tiles that threads share, on several calls at once: the bits of the same tiles on one thread.
void in_tiles(soa_model *model, size_t rounds) {
  const auto tiled = [&](Event &event, int threads) {
    soa_call *call = prepare(model, event, 257);
    char message[256] = "";
    const int code = soa_call_tile(call, "nmm", 32, threads, message, sizeof message);
    expect(code == SOA_OK, "tile: %d %s", code, message);
    return call;
  };
  Event first;
  soa_call *alone = tiled(first, 1);
  expect(run(alone) == SOA_OK, "tiles on one thread");
  soa_call_delete(alone);
  on_threads(3, [&](int t) {
    Event event;
    soa_call *call = tiled(event, 1 + t);
    for (size_t round = 0; round < rounds; ++round) {
      set_rows(call, 257);
      run_and_compare(call, event, first.out, "shared tiles");
      set_rows(call, 33);
      expect(run(call) == SOA_OK, "shared tiles, fewer rows");
    }
    soa_call_delete(call);
  });
}

// A model is closed while five threads run it: each run is right, or refused as closed.
void close_while_running(const std::string &library, const Expected &expected) {
  soa_model *model = open(library, 2);
  std::vector<Event> events(5);
  std::vector<soa_call *> calls;
  for (Event &event : events) calls.push_back(prepare(model, event, 33));
  std::atomic<size_t> begun{0};
  on_threads(6, [&](int t) {
    if (t == 5) {
      while (begun < 20) std::this_thread::yield();
      soa_model_close(model);
      return;
    }
    Event &event = events[static_cast<size_t>(t)];
    soa_call *call = calls[static_cast<size_t>(t)];
    while (true) {
      event.clear();
      ++begun;
      const int code = run(call);
      if (code == SOA_CLOSED) {
        expect(event.out == Event().out, "a closed model wrote");
        break;
      }
      expect(code == SOA_OK && event.out == expected.at({0, 33}), "before close: code %d", code);
    }
    set_rows(call, 5);  // a call outlives its model
    expect(run(call) == SOA_CLOSED, "run after close");
  });
  size_t failed = 99;
  expect(soa_run_many(calls.data(), calls.size(), 3, nullptr, &failed, nullptr, 0) == SOA_CLOSED && failed < 5,
         "run_many after close");
  on_threads(5, [&](int t) { soa_call_delete(calls[static_cast<size_t>(t)]); });
}

// Requires that a refusal has this code, and a message with this text.
void refuses(int code, int wanted, const char *message, const char *text, const char *what) {
  ++refused;
  expect(code == wanted, "%s: code %d, not %d (%s)", what, code, wanted, message);
  expect(std::strstr(message, text) != nullptr, "%s: '%s' does not say '%s'", what, message, text);
}

void bad_arguments(soa_model *model, const std::string &library) {
  char message[256] = "";
  soa_model *none = nullptr;
  const auto opened = [&](const char *path, const char *device, int instances, int threads, soa_model **to) {
    message[0] = '\0';
    return soa_model_open(path, device, nullptr, instances, threads, to, message, sizeof message);
  };
  const char *needed = "needed";
  refuses(opened(nullptr, "cpu", 1, 1, &none), SOA_BAD_ARGUMENT, message, needed, "no library");
  refuses(opened(library.c_str(), nullptr, 1, 1, &none), SOA_BAD_ARGUMENT, message, needed, "no device");
  refuses(opened(library.c_str(), "cpu", -1, 1, &none), SOA_BAD_ARGUMENT, message, needed, "-1 instances");
  refuses(opened(library.c_str(), "cpu", 1, -1, &none), SOA_BAD_ARGUMENT, message, needed, "-1 threads");
  refuses(opened(library.c_str(), "cpu", 1, 1, nullptr), SOA_BAD_ARGUMENT, message, needed, "no place");
  if (fs::exists(fs::path(library).parent_path() / "weights.txt")) {
    refuses(opened(library.c_str(), "cpu", 1, 1, &none), SOA_OPEN_FAILED, message, "weights.txt", "no folder");
  }
  expect(soa_model_open(nullptr, nullptr, nullptr, 0, 0, nullptr, nullptr, 0) == SOA_BAD_ARGUMENT, "all null");
  soa_model_close(nullptr);
  expect(soa_model_arguments(nullptr) == 0, "arguments of nothing");

  Event event;
  const auto good = event.arguments(5);
  soa_call *call = nullptr;
  const auto created = [&](const std::vector<soa_tensor> &arguments) {
    message[0] = '\0';
    return soa_call_create(model, arguments.data(), arguments.size(), &call, message, sizeof message);
  };
  refuses(created({good[0], good[1]}), SOA_BAD_ARGUMENT, message, "2 arguments, the artifact takes 3", "two");
  refuses(created({}), SOA_BAD_ARGUMENT, message, "0 arguments", "none");
  refuses(created({good[0], good[1], good[2], good[2]}), SOA_BAD_ARGUMENT, message, "4 arguments", "four");
  refuses(soa_call_create(nullptr, good.data(), 3, &call, message, sizeof message), SOA_BAD_ARGUMENT, message,
          needed, "no model");
  refuses(soa_call_create(model, nullptr, 3, &call, message, sizeof message), SOA_BAD_ARGUMENT, message, needed,
          "null arguments");
  refuses(soa_call_create(model, good.data(), 3, nullptr, message, sizeof message), SOA_BAD_ARGUMENT, message,
          needed, "no place for the call");

  soa_call *kept = prepare(model, event, 5);
  auto *bytes = reinterpret_cast<char *>(event.in.data());
  auto *end = reinterpret_cast<void *>(UINTPTR_MAX - 63);
  constexpr int64_t most = INT64_MAX;
  const struct {
    soa_tensor tensor;
    const char *text;
  } bad[] = {
      {{nullptr, "float32", 2, {kInputs, kCapacity}}, "null pointer for 7680 bytes"},
      {{bytes, nullptr, 2, {kInputs, kCapacity}}, "needs a dtype"},
      {{bytes, "float31", 2, {kInputs, kCapacity}}, "unknown dtype float31"},
      {{bytes, "", 2, {kInputs, kCapacity}}, "unknown dtype"},
      {{bytes, "float32", 0, {0, 0}}, "1 or 2 sizes"},
      {{bytes, "float32", 3, {1, 1}}, "1 or 2 sizes"},
      {{bytes, "float32", -1, {1, 1}}, "1 or 2 sizes"},
      {{bytes, "float32", 2, {-1, kCapacity}}, "size -1 is negative"},
      {{bytes, "float32", 2, {kInputs, INT64_MIN}}, "is negative"},
      {{bytes + 1, "float32", 2, {kInputs, kCapacity}}, "not a multiple of float32's 4"},
      {{bytes + 4, "float64", 1, {3, 0}}, "not a multiple of float64's 8"},
      {{bytes, "float32", 2, {most, most}}, "end of memory"},
      {{bytes, "float32", 1, {most, 0}}, "end of memory"},
      {{end, "float32", 1, {17, 0}}, "end of memory"},
  };
  for (const auto &[tensor, text] : bad) {
    refuses(created({good[0], tensor, good[2]}), SOA_BAD_ARGUMENT, message, text, "create");
    message[0] = '\0';
    refuses(soa_call_set(kept, 1, &tensor, message, sizeof message), SOA_BAD_ARGUMENT, message, text, "set");
    expect(soa_call_set(kept, 1, &tensor, nullptr, 0) == SOA_BAD_ARGUMENT, "set without a message buffer");
    char tiny[1] = {'x'};
    expect(soa_call_set(kept, 1, &tensor, tiny, 1) == SOA_BAD_ARGUMENT && tiny[0] == '\0', "one byte of message");
  }
  refuses(soa_call_set(kept, 3, &good[0], message, sizeof message), SOA_BAD_ARGUMENT, message, "no argument 3",
          "set index");
  refuses(soa_call_set(kept, SIZE_MAX, &good[0], message, sizeof message), SOA_BAD_ARGUMENT, message,
          "no argument", "set index");
  refuses(soa_call_set(kept, 0, nullptr, message, sizeof message), SOA_BAD_ARGUMENT, message, needed,
          "set null");
  refuses(soa_call_set(nullptr, 0, &good[0], message, sizeof message), SOA_BAD_ARGUMENT, message, needed,
          "set of nothing");
  const size_t both[] = {0, 1};
  const soa_tensor half[] = {good[0], soa_tensor{nullptr, "float32", 2, {6, 32}}};
  refuses(soa_call_update(kept, both, half, 2, message, sizeof message), SOA_BAD_ARGUMENT, message,
          "null pointer", "half of a change");
  refuses(soa_call_update(kept, nullptr, half, 2, message, sizeof message), SOA_BAD_ARGUMENT, message, needed,
          "update without indices");
  refuses(soa_call_update(kept, both, half, SIZE_MAX, message, sizeof message), SOA_BAD_ARGUMENT, message,
          "changes, the artifact takes", "more changes than arguments");
  refuses(soa_call_run(nullptr, nullptr, message, sizeof message), SOA_BAD_ARGUMENT, message, "no call", "run");
  expect(soa_call_run(nullptr, nullptr, nullptr, 0) == SOA_BAD_ARGUMENT, "run without a message buffer");

  soa_call *const some[] = {kept, nullptr};
  size_t failed = 99;
  refuses(soa_run_many(some, 2, 2, nullptr, &failed, message, sizeof message), SOA_BAD_ARGUMENT, message,
          "call 1: no call", "run_many with a null");
  expect(failed == 1, "failed is %zu", failed);
  refuses(soa_run_many(nullptr, 2, 2, nullptr, &failed, message, sizeof message), SOA_BAD_ARGUMENT, message,
          needed, "null calls");
  refuses(soa_run_many(some, 1, 0, nullptr, &failed, message, sizeof message), SOA_BAD_ARGUMENT, message, needed,
          "0 threads");
  expect(soa_run_many(nullptr, 0, 1, nullptr, &failed, nullptr, 0) == SOA_OK && failed == 0, "no calls");
  for (const int32_t threads : {1 << 29, INT32_MAX}) {
    expect(soa_run_many(some, 1, threads, nullptr, nullptr, nullptr, 0) == SOA_OK, "%d threads", threads);
  }
  soa_call_delete(nullptr);
  expect(run(kept) == SOA_OK, "still what it was");
  soa_call_delete(kept);
}

std::string content(const fs::path &file) {
  std::ifstream stream(file, std::ios::binary);
  return {std::istreambuf_iterator<char>(stream), {}};
}

void write(const fs::path &file, const std::string &text) {
  std::ofstream(file, std::ios::binary | std::ios::trunc).write(text.data(), static_cast<std::streamsize>(text.size()));
}

void bad_artifacts(const std::string &library, const fs::path &scratch) {
  char message[1024] = "";
  size_t folders = 0;
  // A copy with one file replaced: the runner maps libraries, so each attempt has a folder of its own.
  const auto attempt = [&](const std::string &file, const std::string &text, const char *says) {
    const fs::path folder = scratch / std::to_string(folders++);
    fs::copy(fs::path(library).parent_path(), folder);
    write(folder / file, text);
    soa_model *model = nullptr;
    message[0] = '\0';
    const fs::path copy = folder / fs::path(library).filename();
    refuses(soa_model_open(copy.c_str(), "cpu", folder.c_str(), 2, 1, &model, message, sizeof message),
            SOA_OPEN_FAILED, message, says, file.c_str());
    expect(model == nullptr, "a refused model was given");
    soa_model_close(model);
  };
  const std::string name = fs::path(library).filename();
  const std::string whole = content(library);
  for (const size_t length : {size_t{0}, size_t{3}, size_t{63}, size_t{64}, size_t{1000}, whole.size() / 2,
                              whole.size() - 1}) {
    attempt(name, whole.substr(0, length), "not a whole 64-bit ELF library");
  }
  for (const size_t at : {size_t{0}, size_t{4}, size_t{0x20}, size_t{0x27}, size_t{0x36}}) {
    std::string changed = whole;  // magic, class, e_phoff (low, high byte), e_phentsize
    changed[at] = static_cast<char>(changed[at] ^ 0xff);
    attempt(name, changed, "not a whole 64-bit ELF library");
  }
  attempt(name, "not a library", "not a whole 64-bit ELF library");

  const fs::path folder = fs::path(library).parent_path();
  if (!fs::exists(folder / "weights.txt")) {  // they are inside, and it runs without torch
    if (content(folder / "target.txt").find("soa-shim") != std::string::npos) {
      attempt("target.txt", "soa-target 1\ncpu/x86-64-v3\nsoa-shim 99\n", "needs version 99");
    }
    return;
  }
  const std::string index = content(folder / "weights.txt"), weights = content(folder / "weights.bin");
  const std::string line = "model_last_weight float32 4 192 2 3 48 48 1";
  const size_t at = index.find(line);
  expect(at != std::string::npos, "weights.txt is not what this test knows");
  if (at == std::string::npos) return;
  const auto edited = [&](const std::string &other) { return std::string(index).replace(at, line.size(), other); };
  const char *unfit = "does not fit weights.bin";
  for (const char *other : {
           "model_last_weight float32 4 192 2 3 48000 48 1",
           "model_last_weight float32 4 192 2 3 -48 48 1",
           "model_last_weight float32 4 192 2 3 48 48",
           "model_last_weight float32 4 192 99 3 48 48 1",
           "model_last_weight float32 4 192 -1 3 48 48 1",
           "model_last_weight float31 4 192 2 3 48 48 1",
           "model_last_weight float32 1 192 2 3 160 160 1",  // an item size that is not the dtype's
           "model_last_weight float32 4 193 2 3 48 48 1",    // not aligned
           "model_last_weight float32 4 1920 2 3 48 48 1",
           "model_last_weight float32 4 18446744073709551612 2 3 48 48 1",
           "model_last_weight float32 4 192 2 4611686018427387905 48 4 1",  // (sizes - 1) * 4 wraps to 0
           "model_last_weight float32 4 192 2 3 48 -48 1",
           "model_last_weight float32 4 99999999999 1 0 1",
           "",
           "model_last_weight",
       }) {
    attempt("weights.txt", edited(other), unfit);
  }
  attempt("weights.txt", "soa-weights 2\n", "not an index of weights");
  attempt("weights.txt", "", "not an index of weights");
  attempt("weights.txt", edited("model_last_weigh float32 4 192 2 3 48 48 1"), "not this artifact's weights");
  attempt("weights.txt", edited(line).substr(0, at), "not this artifact's weights");
  attempt("weights.bin", weights.substr(0, weights.size() - 100), unfit);
  attempt("weights.bin", "", unfit);
  for (const char *text : {"", "soa-target 2\ncpu/x86-64-v2\n", "soa-target 1\n", "soa-target 1\nx86-64-v2\n"}) {
    attempt("target.txt", text, "not a target");
  }
  attempt("target.txt", "soa-target 1\ncpu/x86-64-v5\n", "lacks another processor family");
  attempt("target.txt", "soa-target 1\ncuda/sm_90\n", "built for cuda/sm_90: it cannot be opened on cpu");
  refuses(soa_model_open((scratch / "none.so").c_str(), "cpu", nullptr, 1, 1, nullptr, message, sizeof message),
          SOA_BAD_ARGUMENT, message, "are needed", "nowhere");
  soa_model *model = nullptr;
  refuses(soa_model_open((scratch / "none.so").c_str(), "cpu", nullptr, 1, 1, &model, message, sizeof message),
          SOA_OPEN_FAILED, message, "No such file", "no file");
}

void opened_at_once(const std::string &library, const Expected &expected) {
  on_threads(4, [&](int t) {
    soa_model *model = open(library, 1 + t, t % 2);
    Event event;
    soa_call *call = prepare(model, event, 32);
    run_and_compare(call, event, expected.at({0, 32}), "opened at once");
    if (t % 2 == 0) soa_call_delete(call);
    soa_model_close(model);
    if (t % 2 != 0) soa_call_delete(call);
  });
}

}  // namespace

int main(int argc, char **argv) {
  if (argc != 3) {
    std::fputs("usage: stress LIBRARY ROUNDS\n", stderr);
    return 2;
  }
  const std::string library = argv[1];
  const size_t rounds = std::strtoull(argv[2], nullptr, 10);
  std::string scratch = (fs::temp_directory_path() / "soa-stress-XXXXXX").string();
  if (mkdtemp(scratch.data()) == nullptr) return 2;

  const Expected expected = serial(library);
  soa_model *model = open(library, 4), *second = open(library, 1);
  calls_of_their_own(model, expected, rounds);
  calls_of_their_own(second, expected, rounds / 4);  // eight threads take turns on one instance
  one_call_for_all(model, expected, rounds);
  many_at_once(model, second, expected, rounds / 10 + 1);
  in_tiles(model, rounds);
  for (size_t round = 0; round < rounds / 50 + 1; ++round) close_while_running(library, expected);
  opened_at_once(library, expected);
  bad_arguments(model, library);
  soa_model_close(model);
  soa_model_close(second);
  bad_artifacts(library, scratch);
  fs::remove_all(scratch);
  std::printf("stress: %zu runs, %zu busy, %zu closed, %zu refused, %zu wrong\n", runs.load(), busy.load(),
              closed.load(), refused.load(), wrong.load());
  return wrong == 0 ? 0 : 1;
}
