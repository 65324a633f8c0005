#include "checks.h"

#include <cctype>
#include <cmath>
#include <cstring>

#include "common/artifact.h"

using soa_runner::fail;

namespace soa_library {

namespace {

double float16(std::uint64_t bits) {
  const int exponent = static_cast<int>(bits >> 10 & 31), fraction = static_cast<int>(bits & 1023);
  double size = std::ldexp(1024 + fraction, exponent - 25);
  if (exponent == 0) size = std::ldexp(fraction, -24);  // denormal
  if (exponent == 31) size = fraction == 0 ? INFINITY : NAN;
  return bits >> 15 != 0 ? -size : size;
}

// The bits as a number of another type of the same size or a smaller one.
template <typename T>
T as(std::uint64_t bits) {
  T value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

// Reads a number from memory. The first letter and the size identify the dtype: float16, bfloat16, bool, int8, uint32 ...
long double number(char letter, std::size_t size, const char *address) {
  std::uint64_t bits = 0;
  std::memcpy(&bits, address, std::min(size, sizeof bits));  // little-endian, as on all platforms of torch
  if (letter == 'f' && size == 8) return as<double>(bits);
  if (letter == 'f' && size == 2) return float16(bits);
  if (letter == 'f') return as<float>(bits);
  if (letter == 'b' && size == 2) return as<float>(bits << 16);  // bfloat16 is the upper half of a float32
  if (letter != 'i') return static_cast<long double>(bits);
  const auto unused = static_cast<int>(64 - 8 * size);
  return static_cast<std::int64_t>(bits << unused) >> unused;  // the sign fills the upper bits
}

// A tensor of the file. It is dense, in row-major order.
struct Stored {
  char letter;
  std::size_t itemsize, elements = 1;
  std::vector<std::size_t> shape;
  const char *data;

  long double operator[](std::size_t i) const { return number(letter, itemsize, data + i * itemsize); }
};

// Safetensors: eight bytes of length, a header in JSON, then the data.
struct Tensors {
  const std::string &file;
  std::uint64_t length = 0;
  Json header;

  explicit Tensors(const std::string &stored) : file(stored) {
    std::memcpy(&length, file.data(), std::min<std::size_t>(file.size(), 8));
    if (file.size() < 8 || length > file.size() - 8) throw std::runtime_error("the reference is cut off");
    header = Json::parse(file.substr(8, length));
  }

  // The tensor of this name. Throws if the file does not hold all of it.
  Stored operator[](const std::string &name) const {
    const Json &entry = header[name];
    const std::string &dtype = entry["dtype"].text();  // such as F32, BF16, U8 and BOOL
    const std::size_t digits = dtype.find_first_of("1368");
    const std::size_t itemsize = digits == std::string::npos ? 1 : std::stoul(dtype.substr(digits)) / 8;
    Stored stored{static_cast<char>(std::tolower(dtype.at(0))), itemsize, 1, {}, nullptr};
    for (const Json &extent : entry["shape"].list()) {
      stored.shape.push_back(static_cast<std::size_t>(extent.integer()));
      if (__builtin_mul_overflow(stored.elements, stored.shape.back(), &stored.elements)) stored.elements = SIZE_MAX;
    }
    const auto offset = static_cast<std::size_t>(entry["data_offsets"].at(0).integer());
    const std::size_t room = file.size() - 8 - length;
    if (offset > room || stored.elements > (room - offset) / itemsize) throw std::runtime_error(name + " is cut off");
    stored.data = file.data() + 8 + length + offset;
    return stored;
  }
};

// A collection with the first rows of the stored inputs; all other bytes are 0xff.
soa::Collection filled(const soa::Model &model, const Tensors &tensors, const std::string &name, std::int64_t rows) {
  soa::Collection collection = model.collection(name, rows);
  for (const auto &[address, size] : collection.pieces()) std::memset(address.get(), 0xff, size);
  for (const soa::Column &column : collection.layout().columns) {
    const std::string key = "input/" + name + "/" + column.name;
    if (tensors.header.find(key) == nullptr) continue;
    const Stored stored = tensors[key];
    const std::size_t n = column.kind == "scalar" ? 1 : static_cast<std::size_t>(rows), size = column.itemsize;
    // An element is a matrix, or a vector with one column, or a number.
    const std::size_t matrix_rows = stored.shape.size() > 1 ? stored.shape[1] : 1;
    const std::size_t matrix_columns = stored.shape.size() > 2 ? stored.shape[2] : 1;
    const std::size_t entries = matrix_rows * matrix_columns;
    if (stored.itemsize != size || entries != column.components || stored.elements < n * entries) {
      throw std::runtime_error(key + " is not what the layout says");
    }
    // The file has matrices row by row, the collection has a component for each entry, column by column.
    for (std::size_t k = 0; k < entries; ++k) {
      const std::size_t entry = k % matrix_rows * matrix_columns + k / matrix_rows;
      char *to = collection.column<char>(column.name, k);
      for (std::size_t i = 0; i < n; ++i) std::memcpy(to + i * size, stored.data + (i * entries + entry) * size, size);
    }
  }
  return collection;
}

// Limits the offsets of a jagged collection to the number of items of the case.
void cut_offsets(const soa::Collection &offsets, std::int64_t items) {
  for (const soa::Column &column : offsets.layout().columns) {
    for (std::int64_t i = 0; i < offsets.size(); ++i) {
      char *at = offsets.column<char>(column.name) + static_cast<std::size_t>(i) * column.itemsize;
      if (number('i', column.itemsize, at) > items) std::memcpy(at, &items, column.itemsize);
    }
  }
}

// Adds one value to the deviation of its output. Values that are not finite must be equal, or both NaN.
void add_value(long double actual, long double expected, double atol, double rtol, Worst *worst) {
  const bool same = actual == expected || (std::isnan(actual) && std::isnan(expected));
  const bool finite = std::isfinite(actual) && std::isfinite(expected);
  const long double size = std::fabs(expected), difference = finite ? std::fabs(actual - expected) : INFINITY;
  const long double gap = same ? 0 : difference, allowed = finite ? atol + rtol * size : 0;
  worst->outside += gap > allowed ? 1 : 0;
  worst->gap = std::max(worst->gap, static_cast<double>(gap));
  if (finite && expected != 0) worst->relative = std::max(worst->relative, static_cast<double>(gap / size));
}

// Compares an output with the reference, and then restores its bytes from before the run.
void compare(const Json &plan, const Stored &stored, const Json &tolerance, const soa::Collection &after,
             const soa::Collection &before, Worst *worst) {
  const std::size_t n = plan["kind"].text() == "scalars" ? 1 : static_cast<std::size_t>(after.size());
  const std::size_t features = plan["order"].list().size();
  const double atol = tolerance["atol"].real(), rtol = tolerance["rtol"].real();
  if (stored.elements != n * features) throw std::runtime_error("an output of the reference has another shape");
  for (std::size_t f = 0; f < features; ++f) {
    const Json &component = plan["components"].at(static_cast<std::size_t>(plan["order"].at(f).integer()));
    const soa::Column &column = after.layout()[component.at(0).text()];
    const auto k = static_cast<std::size_t>(component.at(1).integer());
    char *values = after.column<char>(column.name, k);
    for (std::size_t i = 0; i < n; ++i) {
      const long double actual = number(column.dtype[0], column.itemsize, values + i * column.itemsize);
      long double expected = stored[i * features + f];
      if (column.dtype == "float32") expected = static_cast<float>(expected);
      add_value(actual, expected, atol, rtol, worst);
    }
    std::memcpy(values, before.column<char>(column.name, k), n * column.itemsize);
  }
  worst->elements += stored.elements;
}

// Fails if a byte of a collection differs from that before the run.
void require_same(const std::string &name, const soa::Collection &after, const soa::Collection &before, std::size_t number) {
  for (std::size_t k = 0; k < after.pieces().size(); ++k) {
    const auto &[address, size] = after.pieces()[k];
    if (std::memcmp(address.get(), before.pieces()[k].first.get(), size) == 0) continue;
    fail(soa::refusals::deviation_memory, "the artifact wrote outside its outputs in collection '%s' (case %zu)", name.c_str(),
         number);
  }
}

// The collections of a case. rows: the numbers of rows of the case, by row dimension.
Collections collections_of(const soa::Model &model, const Tensors &tensors, const Json &signature, const Json &rows) {
  const Json &layouts = signature["collections"];
  Collections memory;
  for (const std::string &name : layouts.keys) {
    memory.emplace(name, filled(model, tensors, name, rows[layouts[name]["rows"].text()].integer()));
  }
  for (const std::string &name : signature.get("jagged").keys) {
    cut_offsets(memory.at(name + "_offsets"), memory.at(name).size());
  }
  return memory;
}

// Fails if more values of an output are outside its tolerance than the version allows.
void require_tolerance(const std::string &name, const Worst &worst, const Json &tolerance) {
  const Json &max_outside = tolerance.get("max_outside");
  const double share = max_outside.kind == Json::null ? 0 : max_outside.real();  // of the values that may be outside
  if (static_cast<double>(worst.outside) <= share * static_cast<double>(worst.elements)) return;
  fail(soa::refusals::deviation, "output '%s': %zu of %zu values are outside atol %g + rtol %g of the reference, the worst by %.3g",
       name.c_str(), worst.outside, worst.elements, tolerance["atol"].real(), tolerance["rtol"].real(), worst.gap);
}

}  // namespace

std::map<std::string, Worst> check_reference(const Json &manifest, const std::string &stored, const soa::Model &model,
                                             const Place &place) {
  const Tensors tensors(stored);
  const Json &signature = manifest["signature"];
  const Json cases = Json::parse(tensors.header["__metadata__"]["cases"].text());
  std::map<std::string, Worst> worst;
  for (std::size_t i = 0; i < cases.list().size(); ++i) {
    const Collections before = collections_of(model, tensors, signature, cases.at(i));
    const Collections memory = collections_of(model, tensors, signature, cases.at(i));
    std::vector<soa::Memory> bound;
    for (const auto &[name, collection] : memory) bound.push_back(collection);
    model.bind(place.bound ? place.bound(memory) : bound)(place.stream);
    if (place.answered) place.answered(i, memory);
    for (const Json &output : signature["outputs"].list()) {
      const std::string &name = output["name"].text(), &where = output["collection"].text();
      const Stored expected = tensors["output/" + std::to_string(i) + "/" + name];
      compare(output["plan"], expected, manifest["tolerances"][name], memory.at(where), before.at(where), &worst[name]);
    }
    for (const auto &[name, collection] : memory) require_same(name, collection, before.at(name), i);
  }
  for (const auto &[name, deviation] : worst) require_tolerance(name, deviation, manifest["tolerances"][name]);
  return worst;
}

}  // namespace soa_library
