// Runs every target over its folder of the corpus, without a fuzzer and with any compiler: what was
// found once stays found. Ends by a signal where a promise is broken.
#include <filesystem>
#include <fstream>
#include <iterator>

#include "fuzz/target.h"

int main(int argc, char** argv) {
  namespace files = std::filesystem;
  if (argc < 2) {
    std::fprintf(stderr, "usage: %s CORPUS [TARGET [FILE...]]\n", argv[0]);
    return 2;
  }
  bool is_missing = false;
  for (const kvzc::fuzz::Target& target : kvzc::fuzz::targets()) {
    if (argc > 2 && std::string_view(argv[2]) != target.name) continue;
    std::vector<files::path> inputs(argv + std::min(argc, 3), argv + argc);
    const files::path folder = files::path(argv[1]) / target.name;
    std::error_code none;
    if (inputs.empty()) {
      for (const auto& each : files::directory_iterator(folder, none)) inputs.push_back(each.path());
    }
    std::sort(inputs.begin(), inputs.end());
    for (const files::path& path : inputs) {
      std::ifstream file(path, std::ios::binary);
      const std::vector<char> bytes(std::istreambuf_iterator<char>(file), {});
      // So that the last line names the input that ended it.
      std::fprintf(stderr, "\r\033[K%s", path.c_str());
      target.run(std::as_bytes(std::span(bytes)));
    }
    std::fprintf(stderr, "\r\033[K%s: %zu inputs\n", target.name, inputs.size());
    is_missing |= inputs.empty();
  }
  if (is_missing) std::fprintf(stderr, "a target without inputs shows nothing\n");
  return is_missing ? 1 : 0;
}
