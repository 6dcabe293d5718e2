/* MLX's CPU wheel computes float32 matrix products with a reference BLAS. This stands in front of it and gives them
   to OpenBLAS, which is loaded at the first product only: so preloading it costs other programs nothing. One core is
   left to the HTTP threads, the proxy and the agent: OpenBLAS waits for its slowest thread, so with a thread on every
   core a busy neighbour made it 8 times slower (measured on 2 cores; the second thread gains 1.7 times on an idle
   machine). */
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
typedef void (*gemm)(int, int, int, int, int, int, float, const float *, int, const float *, int, float, float *, int);
static gemm openblas;
static gemm find(void) {
  void *library = dlopen(OPENBLAS, RTLD_NOW | RTLD_LOCAL);
  gemm found = library ? (gemm)dlsym(library, "scipy_cblas_sgemm") : 0;
  int (*threads)(void) = library ? (int (*)(void))dlsym(library, "scipy_openblas_get_num_threads") : 0;
  void (*set)(int) = library ? (void (*)(int))dlsym(library, "scipy_openblas_set_num_threads") : 0;
  if (!found) { fprintf(stderr, "start_llm: %s; install start_llm anew\n", dlerror()); abort(); }
  if (threads && set && !getenv("OPENBLAS_NUM_THREADS") && threads() > 1) set(threads() - 1);
  __atomic_store_n(&openblas, found, __ATOMIC_RELEASE);
  return found;
}
void cblas_sgemm(int order, int ta, int tb, int m, int n, int k, float alpha, const float *a, int lda,
                 const float *b, int ldb, float beta, float *c, int ldc) {
  gemm f = __atomic_load_n(&openblas, __ATOMIC_ACQUIRE);
  (f ? f : find())(order, ta, tb, m, n, k, alpha, a, lda, b, ldb, beta, c, ldc);
}
