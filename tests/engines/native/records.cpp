// records: reads what each line of stdin names, as the library does; tests/engines/native/test_records.py compares it with
// Python. A line is "json FILE", "folder FOLDER", or "load FOLDER" and "test FOLDER", which open it in production and in test
// mode. Printed: "no: WHY", or "ok", for JSON with all that was read.
#include <cstdio>
#include <fstream>
#include <iostream>
#include <iterator>

#include "common/artifact.h"
#include "checks.h"
#include "soa_model.hpp"

using soa_library::Json;

namespace {

// Prints a value: strings as hex, "1" before an integer and "0" before another number.
void show(const Json &value) {
  if (value.kind == Json::number) std::printf("%d%.17g,", value.integral ? 1 : 0, value.real());
  if (value.kind == Json::string) {
    for (const char byte : value.text()) std::printf("%02x", static_cast<unsigned char>(byte));
    std::printf(",");
  }
  if (value.kind == Json::null) std::printf("-,");
  if (value.kind == Json::boolean) std::printf("%s,", value.truth() ? "true" : "false");
  if (value.kind != Json::array && value.kind != Json::object) return;
  std::printf("[");
  for (std::size_t i = 0; i < value.items.size(); ++i) {
    if (value.kind == Json::object) {
      for (const char byte : value.keys[i]) std::printf("%02x", static_cast<unsigned char>(byte));
      std::printf("=");
    }
    show(value.items[i]);
  }
  std::printf("]");
}

// Throws if the library refuses the folder.
void read_folder(const std::string &path) {
  const soa_library::Sealed bundle(path);
  soa_library::read_record(bundle.content("manifest.json"), "manifest.json");
}

void load(const std::string &folder, bool test) {
  soa::Loading loading;
  loading.test = test;
  loading.engine = "aoti";
  soa::Model::load(folder, loading);
}

void read(const std::string &kind, const std::string &path) {
  if (kind == "load" || kind == "test") return load(path, kind == "test");
  if (kind == "folder") return read_folder(path);
  std::ifstream file(path, std::ios::binary);
  const Json value = Json::parse({std::istreambuf_iterator<char>(file), {}});
  std::printf("ok ");
  show(value);
}

}  // namespace

int main() {
  for (std::string line; std::getline(std::cin, line);) {
    const std::size_t space = line.find(' ');
    try {
      const std::string kind = line.substr(0, space);
      read(kind, line.substr(space + 1));
      if (kind != "json") std::printf("ok");
    } catch (const soa::Error &error) {
      std::printf("no: %s", soa_library::plain(error.what()).c_str());
    } catch (const std::exception &error) {
      std::printf("no: %s [bundle]", soa_library::plain(error.what()).c_str());
    }
    std::printf("\n");
    std::fflush(stdout);
  }
}
