// Artifacts of the engine `lanes` for GPUs: a kernel in which a thread, or a block of threads, computes one row.
#ifndef SOA_KERNEL_PROGRAM_H
#define SOA_KERNEL_PROGRAM_H

#include <cctype>
#include <fstream>
#include <iterator>
#include <memory>
#include <string>
#include <vector>

#include "device_driver.h"
#include "row_program.h"

namespace soa_runner {

// The file network.kernel, written by engines/lanes/compiling/devices.py: each line has a word and its value.
struct KernelFacts {
  explicit KernelFacts(const std::string &path) {
    std::ifstream file(path);
    std::string line;
    if (!std::getline(file, line) || line != "soa-kernel 1") {
      fail(SOA_OPEN_FAILED, "%s: not a kernel that this runner knows: build it again", path.c_str());
    }
    while (std::getline(file, line)) {
      const std::size_t space = line.find(' ');
      take(line.substr(0, space), space == std::string::npos ? "" : line.substr(space + 1));
    }
    if (rows == 0) rows = threads;  // an older file, of a kernel in which a thread computes one row
    if (!whole()) fail(SOA_OPEN_FAILED, "%s: not whole: build it again", path.c_str());
  }

  // The architecture as a number, as in `Device::architecture`.
  int architecture() const {
    const std::string digits = target.substr(8);
    if (target[0] == 'c') return std::atoi(digits.c_str());
    const std::size_t last = digits.size() - 2;  // gfx90a: 9, 0 and a
    return 10 * std::atoi(digits.substr(0, last).c_str()) + std::stoi(digits.substr(last, 1), nullptr, 16);
  }

  std::string target, kinds, dtypes;
  unsigned threads = 0;
  int64_t rows = 0, columns = 0, items = 0;  // rows: computed by a block of threads
  std::vector<std::string> images;  // machine code; then, optionally, PTX, which the driver compiles for later devices

 private:
  // Takes the value of a word. Words that this runner does not know are left out.
  void take(const std::string &word, const std::string &value) {
    if (word == "target") target = value;
    if (word == "threads") threads = static_cast<unsigned>(std::atoi(value.c_str()));
    if (word == "rows") rows = std::atoll(value.c_str());
    if (word == "columns") columns = std::atoll(value.c_str());
    if (word == "items") items = std::atoll(value.c_str());
    if (word == "kinds") kinds = value;
    if (word == "dtypes") dtypes = value;
    if (word == "image") images.push_back(value);
  }

  bool whole() const {
    const bool known_target = target.compare(0, 8, "cuda/sm_") == 0 || target.compare(0, 8, "rocm/gfx") == 0;
    const bool known_counts = threads >= 1 && threads <= 1024 && rows >= 1 && columns >= 1 && columns <= 4096 &&
                              items >= 0 && items <= 4096;
    const bool known_arguments = !kinds.empty() && kinds.size() == dtypes.size();
    const auto in_this_folder = [](const std::string &name) { return name.find('/') == std::string::npos; };
    return known_target && known_counts && known_arguments && !images.empty() &&
           std::all_of(images.begin(), images.end(), in_this_folder);
  }
};

class KernelProgram : public Artifact {
 public:
  // True for the file of a kernel, by its name.
  static bool is(const std::string &path) { return path.size() > 7 && path.compare(path.size() - 7, 7, ".kernel") == 0; }

  // Loads the kernel that the file `path` describes on a device, "cuda" or "cuda:1".
  KernelProgram(const std::string &path, const char *device_name)
      : Artifact(true), facts(path), device(Driver::of(facts.target.substr(0, 4)), device_name) {
    if (std::strncmp(device_name, "cuda", 4) != 0) {
      fail(SOA_OPEN_FAILED, "the artifact was built for %s: it cannot be opened on %s", facts.target.c_str(), device_name);
    }
    const int here = device.architecture(), built = facts.architecture();
    const bool by_ptx = here > built && facts.images.size() > 1;
    if (here != built && !by_ptx) {
      fail(SOA_OPEN_FAILED, "the artifact was built for %s, and device %d is of architecture %d.%d: build it for that",
           facts.target.c_str(), device.number, here / 10, here % 10);
    }
    const std::string image = content(path.substr(0, path.rfind('/') + 1) + facts.images[by_ptx ? 1 : 0]);
    const Device::Current current(device);
    device.driver.call(kLoad, "loading the kernel", &module_, static_cast<const void *>(image.c_str()));
    device.driver.call(kFunction, "loading the kernel", &function, module_, "soa_rows");
    inputs = facts.kinds.size();
    rows_ = {1, facts.columns, 0, 1, static_cast<int64_t>(inputs), facts.kinds.c_str(), facts.dtypes.c_str()};
  }
  ~KernelProgram() override { device.driver.attempt(kUnload, module_); }

  std::unique_ptr<Bound> bind(const std::vector<Memory> &memory) override;

  const RowFacts &rows() const { return rows_; }

  const KernelFacts facts;
  const Device device;
  void *function = nullptr;

 private:
  static std::string content(const std::string &path) {
    std::ifstream file(path, std::ios::binary);
    const std::string bytes{std::istreambuf_iterator<char>(file), {}};
    if (bytes.empty()) fail(SOA_OPEN_FAILED, "%s: cannot be read", path.c_str());
    return bytes;
  }

  RowFacts rows_{};
  void *module_ = nullptr;
};

// One launch on the caller's stream. It does not wait, allocate or copy.
class KernelArguments : public ColumnArguments {
 public:
  KernelArguments(const KernelProgram &program, const std::vector<Memory> &memory)
      : ColumnArguments(program.rows(), memory), program_(program) {
    for (size_t i = 0; i < memory.size(); ++i) require_here(i, memory[i]);
  }

  void replace(const std::vector<size_t> &indices, const std::vector<Memory> &memory) override {
    for (size_t k = 0; k < indices.size(); ++k) require_here(indices[k], memory[k]);
    ColumnArguments::replace(indices, memory);
  }

  void run(const Tiling &, int, void *stream) override {
    if (rows_ == 0) return;
    const int64_t blocks = (rows_ - 1) / program_.facts.rows + 1;
    if (blocks > INT32_MAX) fail(SOA_BAD_ARGUMENT, "%lld rows are too many for one launch", static_cast<long long>(rows_));
    // The kernel takes one struct by value: the columns, the numbers of items (at least one word), and that of the rows.
    words_.assign(columns_.begin(), columns_.end());
    for (const int64_t count : items_) words_.push_back(reinterpret_cast<void *>(count));
    if (items_.empty()) words_.push_back(nullptr);
    words_.push_back(reinterpret_cast<void *>(rows_));
    void *arguments[] = {words_.data()};
    const Device::Current current(program_.device);
    if (stream != nullptr && stream != checked_stream_) program_.device.require_stream(stream);
    checked_stream_ = stream;
    program_.device.driver.call(kLaunch, "running the kernel", program_.function, static_cast<unsigned>(blocks), 1u, 1u,
                                program_.facts.threads, 1u, 1u, 0u, stream, &arguments[0], static_cast<void **>(nullptr));
  }

 private:
  // Throws unless the memory of an argument, if it has any, is on the program's device.
  void require_here(size_t argument, const Memory &memory) const {
    if (memory.data != nullptr && memory.sizes[0] > 0) program_.device.require_memory(memory.data, argument);
  }

  const KernelProgram &program_;
  std::vector<void *> words_;         // the kernel's argument, of the last run
  void *checked_stream_ = nullptr;  // the stream of the last run, which is one of the device
};

inline std::unique_ptr<Bound> KernelProgram::bind(const std::vector<Memory> &memory) {
  return std::make_unique<KernelArguments>(*this, memory);
}

}  // namespace soa_runner

#endif
