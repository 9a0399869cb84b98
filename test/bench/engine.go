// SPDX-License-Identifier: Apache-2.0

//go:build linux

package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"net/http"
	"net/netip"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"github.com/fairlead/fairlead/internal/schedule"
	"github.com/fairlead/fairlead/test/kit/enclave"
	"github.com/fairlead/fairlead/test/kit/netns"
)

const (
	containerPublished = "container is started → message that names it, of a port that it publishes"
	containerHost      = "container is started → message that names it, of a port in the guest's own network"
)

// Pollers list all that an API has.
const modeList1, modeList3 = "list 1 s", "list 3 s"

var (
	listModes = []string{modeBPF, modeList1, modeList3}
	listEvery = map[string]time.Duration{modeList1: time.Second, modeList3: 3 * time.Second}
)

func enginePart() part {
	return part{"engine", "engine", []measure{
		{name: containerPublished, unit: "s", modes: append(append([]string{}, ownModes...), modeList1, modeList3)},
		{name: containerHost, unit: "s", modes: ownModes},
	}, inEnclave(containers)}
}

func containers(ctx context.Context, b *bench) error {
	d, err := startDocker(ctx, b)
	if err != nil {
		return err
	}
	var guests []*guest
	for _, m := range modes {
		here, err := netns.Open("/proc/self/ns/net")
		if err != nil {
			return err
		}
		g, err := b.newGuest(m, here)
		if err == nil {
			err = g.start("--docker-host", "unix://"+enclave.DockerSocket)
		}
		if err == nil {
			err = g.connect(ctx)
		}
		if err != nil {
			return fmt.Errorf("%s: %w", m.name, err)
		}
		guests = append(guests, g)
	}
	polled := b.of(14, 6, 1)
	for i := range b.of(104, 30, 2) {
		if err := d.round(ctx, b, guests, i, i < polled); err != nil {
			return fmt.Errorf("container %d: %w", i, err)
		}
	}
	for _, g := range guests {
		if err := g.check(ctx); err != nil {
			return fmt.Errorf("%s: %w", g.mode.name, err)
		}
	}
	return nil
}

// round starts a container of each kind, and waits until it was seen. Pollers are slow,
// so they are not part of all rounds.
func (d *dockerd) round(ctx context.Context, b *bench, guests []*guest, i int, polled bool) error {
	for j, measure := range []string{containerPublished, containerHost} {
		if err := schedule.Sleep(ctx, rand.N(300*time.Millisecond)); err != nil {
			return err
		}
		name := fmt.Sprintf("bench-%d-%d", i, j)
		k := tcpKey(uint16(20_000 + 2*i + j))
		waits := map[string]func(context.Context) (time.Time, error){}
		for _, g := range guests {
			if polled || g.mode.poll == 0 || measure == containerPublished {
				waits[g.mode.name] = g.peer.expect(k, name)
			}
		}
		for mode, every := range listEvery {
			if polled && measure == containerPublished {
				waits[mode] = pollEach(ctx, every, func(ctx context.Context) (bool, error) { return d.publishes(ctx, name) })
			}
		}
		id, started, err := d.run(ctx, name, k.AddrPort(), measure == containerHost)
		if err != nil {
			return err
		}
		for mode, wait := range waits {
			at, err := wait(ctx)
			if err != nil {
				return fmt.Errorf("%s: %w", mode, err)
			}
			b.add(measure, mode, 0, at.Sub(started).Seconds())
		}
		if err := d.ask(ctx, http.MethodDelete, "/containers/"+id+"?force=1", nil, nil); err != nil {
			return err
		}
	}
	return nil
}

// pollEach calls look in intervals, from a random moment on, until it is true. It
// returns a function that waits for that.
func pollEach(ctx context.Context, every time.Duration, look func(context.Context) (bool, error)) func(context.Context) (time.Time, error) {
	type result struct {
		at  time.Time
		err error
	}
	done := make(chan result, 1)
	go func() {
		for next := rand.N(every); ; next = every {
			err := schedule.Sleep(ctx, next)
			seen := false
			if err == nil {
				seen, err = look(ctx)
			}
			if seen || err != nil {
				done <- result{time.Now(), err}
				return
			}
		}
	}()
	return func(context.Context) (time.Time, error) {
		r := <-done
		return r.at, r.err
	}
}

// dockerd is Debian's engine in this enclave, and a client of its API.
type dockerd struct {
	client *http.Client
	events *json.Decoder // starts of containers
}

// startDocker starts the engine, and waits until it has the image.
func startDocker(ctx context.Context, b *bench) (*dockerd, error) {
	dir, err := b.tempDir()
	if err != nil {
		return nil, err
	}
	d := &dockerd{client: &http.Client{Transport: &http.Transport{
		MaxIdleConnsPerHost: 8,
		DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
			return new(net.Dialer).DialContext(ctx, "unix", enclave.DockerSocket)
		},
	}}}
	log, err := b.daemon(dir, enclave.Dockerd())
	if err != nil {
		return nil, err
	}
	b.progress("waiting for dockerd")
	if err := eventually(ctx, func() error { return d.ask(ctx, http.MethodGet, "/_ping", nil, nil) }); err != nil {
		return nil, log.tail(err)
	}
	image, err := enclave.ImageArchive(dir)
	if err != nil {
		return nil, err
	}
	tar, err := os.Open(image)
	if err != nil {
		return nil, err
	}
	defer func() { _ = tar.Close() }()
	if err := d.ask(ctx, http.MethodPost, "/images/load", tar, nil); err != nil {
		return nil, err
	}
	events, err := d.send(ctx, http.MethodGet, "/events?filters="+url.QueryEscape(`{"type":["container"],"event":["start"]}`), nil)
	if err != nil {
		return nil, err
	}
	b.cleanup(func() { _ = events.Close() })
	d.events = json.NewDecoder(events)
	return d, nil
}

// logFile has the output of a daemon.
type logFile string

// tail adds the end of the log to an error.
func (l logFile) tail(err error) error {
	b, _ := os.ReadFile(string(l))
	return fmt.Errorf("%w; the end of %s:\n%s", err, filepath.Base(string(l)), b[max(0, len(b)-1000):])
}

// daemon starts a program that lives until the part ends.
func (b *bench) daemon(dir string, args []string) (logFile, error) {
	name := filepath.Join(dir, filepath.Base(args[0])+".log")
	out, err := os.Create(name)
	if err != nil {
		return "", err
	}
	defer func() { _ = out.Close() }()
	cmd := exec.Command(args[0], args[1:]...)
	cmd.Stdout, cmd.Stderr = out, out
	if err := cmd.Start(); err != nil {
		return "", fmt.Errorf("%s, which hack/provision-engines.sh provides: %w", args[0], err)
	}
	b.cleanup(func() {
		_ = cmd.Process.Signal(syscall.SIGTERM)
		kill := time.AfterFunc(10*time.Second, func() { _ = cmd.Process.Kill() })
		_ = cmd.Wait()
		kill.Stop()
	})
	return logFile(name), nil
}

// send asks the engine; body is an io.Reader, or sent as JSON. The caller closes the
// answer.
func (d *dockerd) send(ctx context.Context, method, path string, body any) (io.ReadCloser, error) {
	kind, in := "application/x-tar", io.Reader(nil)
	switch b := body.(type) {
	case nil:
	case io.Reader:
		in = b
	default:
		text, err := json.Marshal(b)
		if err != nil {
			return nil, err
		}
		kind, in = "application/json", bytes.NewReader(text)
	}
	req, err := http.NewRequestWithContext(ctx, method, "http://docker"+path, in)
	if err != nil {
		return nil, err
	}
	req.Header.Set("Content-Type", kind)
	resp, err := d.client.Do(req)
	if err != nil {
		return nil, err
	}
	if resp.StatusCode >= 300 {
		b, _ := io.ReadAll(resp.Body)
		_ = resp.Body.Close()
		return nil, fmt.Errorf("docker: %s %s: %s: %.300s", method, path, resp.Status, b)
	}
	return resp.Body, nil
}

// ask is send with the whole answer, which is JSON if it is wanted.
func (d *dockerd) ask(ctx context.Context, method, path string, body, answer any) error {
	in, err := d.send(ctx, method, path, body)
	if err != nil {
		return err
	}
	b, err := io.ReadAll(in)
	err = errors.Join(err, in.Close())
	if err == nil && answer != nil {
		err = json.Unmarshal(b, answer)
	}
	return err
}

// run starts a container with a web server, which publishes a port or, with the host's
// network, has that of the guest. It returns the time of the engine's event.
func (d *dockerd) run(ctx context.Context, name string, at netip.AddrPort, host bool) (id string, started time.Time, err error) {
	type object = map[string]any
	config := object{"Image": enclave.Image, "Cmd": []string{"httpd", "-f", "-p", at.String()}, "HostConfig": object{"NetworkMode": "host"}}
	if !host {
		config["Cmd"] = []string{"httpd", "-f", "-p", "80"}
		config["ExposedPorts"] = object{"80/tcp": object{}}
		config["HostConfig"] = object{"PortBindings": object{"80/tcp": []object{{"HostIp": at.Addr().String(), "HostPort": fmt.Sprint(at.Port())}}}}
	}
	var made struct{ ID string }
	if err := d.ask(ctx, http.MethodPost, "/containers/create?name="+name, config, &made); err != nil {
		return "", started, err
	}
	if err := d.ask(ctx, http.MethodPost, "/containers/"+made.ID+"/start", nil, nil); err != nil {
		return "", started, err
	}
	for {
		var event struct {
			Actor    struct{ ID string }
			TimeNano int64 `json:"timeNano"`
		}
		if err := d.events.Decode(&event); err != nil {
			return "", started, fmt.Errorf("events of docker: %w", err)
		}
		if event.Actor.ID == made.ID {
			return made.ID, time.Unix(0, event.TimeNano), nil
		}
	}
}

// publishes reports whether a container of that name publishes a port.
func (d *dockerd) publishes(ctx context.Context, name string) (bool, error) {
	var all []struct {
		Names []string
		Ports []struct{ PublicPort uint16 }
	}
	if err := d.ask(ctx, http.MethodGet, "/containers/json", nil, &all); err != nil {
		return false, err
	}
	for _, c := range all {
		if strings.Join(c.Names, "") == "/"+name && len(c.Ports) > 0 {
			return true, nil
		}
	}
	return false, nil
}
