// SPDX-License-Identifier: Apache-2.0

package hvsock

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"os/exec"
	"slices"
	"strings"
	"syscall"
	"time"

	"github.com/Microsoft/go-winio"
	"github.com/Microsoft/go-winio/pkg/guid"
	"golang.org/x/sys/windows"
	"golang.org/x/sys/windows/registry"

	"github.com/fairlead/fairlead/internal/config/trust"
)

// computeSystems is where the Host Compute Service lists, for everybody to read,
// what it runs.
const computeSystems = `SOFTWARE\Microsoft\Windows NT\CurrentVersion\HostComputeService\VolatileStore\ComputeSystem`

const (
	askTimeout = 15 * time.Second // for wsl.exe about what runs
	outputMax  = 64 << 10         // bytes of its output
)

// NewSystem returns this machine.
func NewSystem() (System, error) { return system{}, nil }

type system struct{}

func (system) Machines(context.Context) ([]GUID, error) {
	key, err := registry.OpenKey(registry.LOCAL_MACHINE, computeSystems, registry.ENUMERATE_SUB_KEYS)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil // as before the first machine is started
	}
	if err != nil {
		return nil, fmt.Errorf("list the virtual machines: registry key %s: %w", computeSystems, err)
	}
	defer func() { _ = key.Close() }()
	names, err := key.ReadSubKeyNames(0)
	if err != nil {
		return nil, fmt.Errorf("list the virtual machines: registry key %s: %w", computeSystems, err)
	}
	var ids []GUID
	for _, name := range names {
		if id, err := ParseGUID(name); err == nil {
			ids = append(ids, id)
		}
	}
	slices.SortFunc(ids, func(a, b GUID) int { return strings.Compare(a.String(), b.String()) })
	return ids, nil
}

func (system) WSL(ctx context.Context, args ...string) ([]byte, error) {
	ctx, cancel := context.WithTimeout(ctx, askTimeout)
	defer cancel()
	return RunWSL(ctx, args...)
}

// RunWSL returns what wsl.exe of this Windows prints, at most 64 KiB of it. It ends with ctx.
func RunWSL(ctx context.Context, args ...string) ([]byte, error) {
	wsl, err := trust.Find("wsl.exe")
	if err != nil {
		return nil, err
	}
	cmd := exec.CommandContext(ctx, wsl, args...)
	cmd.Env = append(os.Environ(), "WSL_UTF8=1")
	cmd.SysProcAttr = &syscall.SysProcAttr{HideWindow: true, CreationFlags: windows.CREATE_NO_WINDOW}
	cmd.WaitDelay = time.Second
	out, err := cmd.Output()
	if ctx.Err() != nil {
		err = ctx.Err()
	}
	if err != nil {
		err = fmt.Errorf("wsl.exe: %w", err)
	}
	return out[:min(len(out), outputMax)], err
}

func (system) Connect(ctx context.Context, machine, service GUID) (net.Conn, error) {
	type result struct {
		conn net.Conn
		err  error
	}
	done := make(chan result, 1)
	go func() { // go-winio's Dial does not end with its context
		conn, err := winio.Dial(ctx, &winio.HvsockAddr{VMID: guid.FromWindowsArray(machine), ServiceID: guid.FromWindowsArray(service)})
		if err != nil {
			done <- result{nil, err}
			return
		}
		done <- result{conn, nil}
	}()
	select {
	case r := <-done:
		return r.conn, hint(r.err)
	case <-ctx.Done():
		go func() {
			if r := <-done; r.conn != nil {
				_ = r.conn.Close()
			}
		}()
		return nil, ctx.Err()
	}
}

// hint adds what the error codes of Hyper-V sockets mean in practice.
func hint(err error) error {
	switch {
	case errors.Is(err, windows.WSAEACCES):
		return fmt.Errorf("%w: only the user who started the machine may connect to it", err)
	case errors.Is(err, windows.WSAECONNREFUSED):
		return fmt.Errorf("%w: nothing listens there: is the agent running with --link vsock://:PORT?", err)
	}
	return err
}
