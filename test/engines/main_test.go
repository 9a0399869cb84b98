// SPDX-License-Identifier: Apache-2.0

//go:build linux && engines

// Package engines runs the sources of declared ports against real engines:
// Debian's dockerd, containerd with nerdctl and CNI, and a Kubernetes API server
// with kube-proxy, as hack/provision-engines.sh provides them.
//
// The tests run in an enclave. They need root.
package engines

import (
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"sync"
	"testing"

	"go.uber.org/goleak"

	"github.com/fairlead/fairlead/test/enclave"
	"github.com/fairlead/fairlead/test/program"
)

// nodeAddr is an address of the guest that is not loopback.
const nodeAddr = enclave.NodeAddr

func TestMain(m *testing.M) {
	if enclave.Dir() != "" {
		if err := enclave.SetUp(); err != nil {
			fmt.Fprintln(os.Stderr, "set up the namespaces:", err)
			os.Exit(1)
		}
		os.Exit(runTests(m))
	}
	code, err := runInside()
	if err != nil {
		fmt.Fprintln(os.Stderr, "run inside namespaces:", err)
		os.Exit(1)
	}
	os.Exit(code)
}

// runTests runs the tests, and fails too if a source left a goroutine behind.
func runTests(m *testing.M) int {
	code := m.Run()
	if err := goleak.Find(); code == 0 && err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	return code
}

// runInside runs this binary again in new namespaces. Where all tests run, those
// of Docker run in namespaces of their own, beside the others: engines spend much
// of their time waiting.
func runInside() (int, error) {
	dir, err := os.MkdirTemp("", "fl-engines-")
	if err != nil {
		return 0, err
	}
	defer func() { _ = os.RemoveAll(dir) }()
	binary, err := program.Path(dir)
	if err != nil {
		return 0, err
	}
	flag.Parse()
	if flag.Lookup("test.run").Value.String() != "" || flag.Lookup("test.skip").Value.String() != "" {
		return inside(binary, os.Stdout)
	}
	// What the second says is shown after what the first does.
	later, err := os.Create(filepath.Join(dir, "later"))
	if err != nil {
		return 0, err
	}
	defer func() { _ = later.Close() }()
	var code int
	var second error
	var wg sync.WaitGroup
	wg.Go(func() { code, second = inside(binary, later, "-test.run=Docker") })
	first, err := inside(binary, os.Stdout, "-test.skip=Docker")
	wg.Wait()
	if _, err := later.Seek(0, io.SeekStart); err != nil {
		return 0, err
	}
	_, copied := io.Copy(os.Stdout, later)
	return max(first, code), errors.Join(err, second, copied)
}

// inside runs this binary in new namespaces, with flags besides its own.
func inside(binary string, out *os.File, flags ...string) (int, error) {
	self, err := os.Executable()
	if err != nil {
		return 0, err
	}
	cmd := exec.Command(self, slices.Concat(os.Args[1:], flags)...)
	cmd.Env = append(os.Environ(), program.Variable+"="+binary)
	cmd.Stdout, cmd.Stderr = out, out
	err = enclave.Run(cmd)
	var exit *exec.ExitError
	if errors.As(err, &exit) {
		return max(1, exit.ExitCode()), nil
	}
	return 0, err
}

// binary is the program under test, built outside.
func binary() string { return os.Getenv(program.Variable) }

// cgroupParent holds every container's cgroup.
func cgroupParent() string { return enclave.CgroupParent() }
