// The kernel as a function of the CPU, for the driver that emulates a GPU's driver (engines/native/emulated). Included
// at the end of a network's file.
#if !defined(__CUDACC_RTC__) && !defined(__HIP__)
#define EXPORTED extern "C" __attribute__((visibility("default")))
EXPORTED const uint64_t soa_rows_given = sizeof(Given);
EXPORTED void soa_rows_on_cpu(const void *given, uint32_t blocks, uint32_t threads) {
  for (block_number = 0; block_number < blocks; ++block_number) {
    for (thread_number = 0; thread_number < threads; ++thread_number) soa_rows(*(const Given *)given);
  }
}
#endif
