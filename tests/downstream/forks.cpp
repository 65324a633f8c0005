// forks BUNDLE THREADS EVENTS CHILDREN: threads run events while the process forks; each child runs one event and dies. A
// last child, made when the threads have ended, closes the model. That of the parent ends after main. The program's locale
// groups digits, as an application's may.
#include <sys/wait.h>
#include <unistd.h>

#include <iostream>
#include <locale>
#include <optional>
#include <thread>

#include "jets.hpp"

namespace {

struct Grouping : std::numpunct<char> {
  char do_thousands_sep() const override { return ','; }
  std::string do_grouping() const override { return "\3"; }
};

std::optional<soa::Model> model;

void run_event() {
  const soa::Collection inputs = model->collection("jets", 900), outputs = model->collection("tags", 900);
  model->bind({inputs, outputs})();
}

// Whether a child ran an event.
bool forked(bool closing) {
  const pid_t process = fork();
  if (process == 0) {
    alarm(20);  // one that waits forever ends by this signal
    try {
      run_event();
    } catch (const soa::Error &error) {  // a thread of the parent was in a call
      std::cerr << error.what() << '\n';
    }
    if (closing) model.reset();
    _exit(0);
  }
  int status = 1;
  return waitpid(process, &status, 0) == process && status == 0;
}

}  // namespace

int main(int, char **argv) {
  std::locale::global(std::locale(std::locale(), new Grouping));
  const int threads = std::stoi(argv[2]), events = std::stoi(argv[3]);
  try {
    soa::Loading loading;
    loading.any_version = true;
    loading.instances = threads;
    model = jets::load(argv[1], loading);
    std::vector<std::thread> all;
    for (int t = 0; t < threads; ++t) {
      all.emplace_back([&] {
        for (int i = 0; i < events; ++i) run_event();
      });
    }
    bool right = true;
    for (int child = std::stoi(argv[4]); child > 0; --child) right = forked(false) && right;
    for (std::thread &thread : all) thread.join();
    return forked(true) && right ? 0 : 1;
  } catch (const soa::Error &error) {
    std::cerr << error.what() << '\n';
    return 1;
  }
}
