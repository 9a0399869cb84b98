// SPDX-License-Identifier: Apache-2.0

package pair

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os/exec"
	"strconv"
	"strings"
	"time"

	"github.com/fairlead/fairlead/internal/config/trust"
)

// Limits of a command.
const (
	commandTimeout = 2 * time.Minute // a person may have to type a passphrase
	maxOutput      = 1 << 20         // bytes; the definition of a virtual machine is the longest
	maxStderr      = 512             // bytes of it in an error
)

// program is one of this machine's, by its absolute path. No shell sees its arguments.
type program struct {
	path    string
	timeout time.Duration // of a run; 0 for commandTimeout
}

// find looks for a program of this user in PATH, once.
func find(name string) (program, error) {
	path, err := trust.InPath(name)
	if errors.Is(err, fs.ErrNotExist) {
		return program{}, fmt.Errorf("%s is not installed here (not in PATH): pass the token in with --from FILE", name)
	}
	if err != nil {
		return program{}, fmt.Errorf("%s is not run: %w", name, err)
	}
	return program{path: path}, nil
}

// output runs the program without input and returns what it prints. The error names the
// command and how it ended, and ends with what to do.
func (p program) output(ctx context.Context, remedy string, args ...string) ([]byte, error) {
	limit := cmp.Or(p.timeout, commandTimeout)
	ctx, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	stdout, stderr := limited{max: maxOutput + 1}, limited{max: maxStderr}
	cmd := exec.CommandContext(ctx, p.path, args...)
	cmd.Stdout, cmd.Stderr = &stdout, &stderr
	cmd.WaitDelay = time.Second
	err := cmd.Run()
	switch {
	case errors.Is(ctx.Err(), context.DeadlineExceeded):
		err = fmt.Errorf("did not end within %s", limit)
	case ctx.Err() != nil:
		err = errors.New("interrupted")
	case err == nil && stdout.kept.Len() > maxOutput:
		err = fmt.Errorf("more than %d bytes of output", maxOutput)
	}
	if err == nil {
		return stdout.kept.Bytes(), nil
	}
	command := strings.Join(append([]string{p.path}, args...), " ")
	if text := strings.Join(strings.Fields(stderr.kept.String()), " "); text != "" {
		return nil, fmt.Errorf("%s: %w: %s: %s", command, err, strconv.Quote(text), remedy)
	}
	return nil, fmt.Errorf("%s: %w: %s", command, err, remedy)
}

// limited keeps the first bytes that are written to it.
type limited struct {
	max  int
	kept bytes.Buffer // not embedded: its ReadFrom has no limit
}

func (l *limited) Write(b []byte) (int, error) {
	if room := l.max - l.kept.Len(); room > 0 {
		l.kept.Write(b[:min(room, len(b))])
	}
	return len(b), nil
}
