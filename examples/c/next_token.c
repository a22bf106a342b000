/* Chooses a next token from logits: softmax with a temperature shows the probabilities, and sampling draws one. */
#include <metalcore.h>
#include <stdio.h>
#include <stdlib.h>

enum { VOCAB = 8 };

static void check(int status) {
  if (status == METALCORE_OK) return;
  fprintf(stderr, "%s: %s\n", metalcore_status_name(status), metalcore_last_error());
  exit(1);
}

int main(void) {
  const float logits[VOCAB] = {0.5f, 2.0f, -1.0f, 1.5f, 0.0f, 3.0f, -2.0f, 1.0f};
  const float uniform = 0.25f; /* a random number from 0 to 1 */
  const float temperature = 0.7f;
  float probabilities[VOCAB];
  int64_t token = -1;
  int i;

  check(metalcore_softmax_float(logits, probabilities, 1, VOCAB, temperature));
  for (i = 0; i < VOCAB; ++i) printf("token %d: %.4f\n", i, probabilities[i]);

  check(metalcore_sample_float(logits, &uniform, &token, 1, VOCAB, temperature, 3, 0.95f));
  printf("drawn: %d\n", (int)token);

  /* A wrong argument is an error with a text, and nothing is written. */
  if (metalcore_softmax_float(logits, probabilities, 1, VOCAB, 0.0f) != METALCORE_INVALID_ARGUMENT) return 1;
  printf("%s\n", metalcore_last_error());
  return 0;
}
