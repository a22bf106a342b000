#include "symbolize.h"

#include "process_wide.h"

#include <fcntl.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <filesystem>
#include <map>
#include <mutex>
#include <sstream>
#include <utility>
#include <vector>

extern char** environ;

namespace metalcore::simulator {
namespace {

// Returns what a program prints, or "" where it cannot be run.
std::string output_of(const std::vector<std::string>& command) {
  int ends[2];
  if (pipe2(ends, O_CLOEXEC) != 0) return "";
  posix_spawn_file_actions_t actions;
  posix_spawn_file_actions_init(&actions);
  posix_spawn_file_actions_adddup2(&actions, ends[1], STDOUT_FILENO);
  posix_spawn_file_actions_addopen(&actions, STDERR_FILENO, "/dev/null", O_WRONLY, 0);
  std::vector<char*> arguments;
  for (const auto& argument : command) arguments.push_back(const_cast<char*>(argument.c_str()));
  arguments.push_back(nullptr);
  pid_t child;
  const int failed = posix_spawnp(&child, arguments[0], &actions, nullptr, arguments.data(), environ);
  posix_spawn_file_actions_destroy(&actions);
  close(ends[1]);
  std::string text;
  if (!failed) {
    char buffer[4096];
    for (ssize_t count; (count = read(ends[0], buffer, sizeof buffer)) > 0 || (count < 0 && errno == EINTR);)
      if (count > 0) text.append(buffer, static_cast<size_t>(count));
    int status;
    while (waitpid(child, &status, 0) < 0 && errno == EINTR) {
    }
  }
  close(ends[0]);
  return text;
}

bool is_own_header(const std::string& file) { return file.find("msl/include/") != std::string::npos; }

// The tools print a name that #line gives with the folder of the compiler's run before it.
std::string display_name(const std::string& file) {
  std::error_code error;
  return std::filesystem::exists(file, error) ? file : std::filesystem::path(file).filename().string();
}

// The lines are "file:line" or "file:line (discriminator n)", innermost frame first; "??:0" where unknown.
SourceLine parse(const std::string& text) {
  std::istringstream lines(text);
  for (std::string line; std::getline(lines, line);) {
    const size_t colon = line.rfind(':', line.find(" (discriminator"));
    if (colon == std::string::npos) continue;
    const std::string file = line.substr(0, colon);
    const auto number = static_cast<uint32_t>(std::strtoul(line.c_str() + colon + 1, nullptr, 10));
    if (file != "??" && number && !is_own_header(file)) return {display_name(file), number};
  }
  return {};
}

struct Known {
  std::mutex mutex;
  std::map<std::pair<std::string, uintptr_t>, SourceLine> lines;
};

}  // namespace

SourceLine find_line(const std::string& library, uintptr_t offset) {
  Known& known = process_wide<Known>();
  std::lock_guard lock(known.mutex);
  const auto key = std::make_pair(library, offset);
  if (const auto found = known.lines.find(key); found != known.lines.end()) return found->second;
  std::ostringstream hexadecimal;
  hexadecimal << "0x" << std::hex << offset;
  const std::string address = hexadecimal.str();
  SourceLine result;
  using Command = std::vector<std::string>;
  for (const Command& command : {
           Command{"addr2line", "-i", "-e", library, address},
           Command{"llvm-symbolizer", "--output-style=GNU", "--functions=none", "--inlines", "--obj=" + library,
                   address},
       }) {
    result = parse(output_of(command));
    if (result.line) break;
  }
  return known.lines[key] = result;
}

}  // namespace metalcore::simulator
