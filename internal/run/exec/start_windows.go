// SPDX-License-Identifier: Apache-2.0

package exec

import (
	"errors"
	"fmt"
	"os"
	"runtime"
	"sync"
	"time"
	"unsafe"

	"golang.org/x/sys/windows"
)

const (
	// goneTimeout bounds how long killed processes take to go.
	goneTimeout = 10 * time.Second
	// killCode is the exit code of what was killed, as shells of Unix have it.
	killCode = 128 + 9
	// attributeJobList is PROC_THREAD_ATTRIBUTE_JOB_LIST, since Windows 10.
	attributeJobList = 0x0002000d
)

// job is a program. It and all that it starts are in a job object, from the first instruction
// on, which none can leave, and which the kernel kills when its only handle is closed, as at
// the end of this process.
type job struct {
	stdin   pipe
	outputs [2]pipe
	output  [2]output
	console bool // it shares this process's console

	mu      sync.Mutex
	object  windows.Handle // of the job
	process windows.Handle // of the program, 0 when it has ended
	pid     uint32         // names also its process group
	input   windows.Handle // the program's handle of our end of stdin, 0 when the input is whole
	killed  bool
	sent    string // the last that was sent
}

func start(p Program) (*Job, error) {
	file, err := openImage(p.Path, p.SHA256)
	if err != nil {
		return nil, err
	}
	defer func() { _ = file.Close() }()
	j := new(job)
	if err = j.prepare(); err == nil {
		err = j.begin(file.path, p)
	}
	for _, end := range []*pipe{&j.stdin, &j.outputs[0], &j.outputs[1]} {
		end.leave()
	}
	if err != nil {
		j.Close()
		return nil, fmt.Errorf("start %s: %w", p.Path, err)
	}
	return &Job{Stdin: input{j}, Stdout: &j.output[0], Stderr: &j.output[1], Process: j}, nil
}

// prepare makes the pipes and the job object.
func (j *job) prepare() (err error) {
	if j.stdin, err = newPipe(true); err != nil {
		return err
	}
	for i := range j.outputs {
		if j.outputs[i], err = newPipe(false); err != nil {
			return err
		}
		j.output[i].file = j.outputs[i].ours
	}
	if j.object, err = windows.CreateJobObject(nil, nil); err != nil {
		return os.NewSyscallError("CreateJobObject", err)
	}
	limits := &windows.JOBOBJECT_EXTENDED_LIMIT_INFORMATION{BasicLimitInformation: windows.JOBOBJECT_BASIC_LIMIT_INFORMATION{
		// A program that crashes ends, and shows no window.
		LimitFlags: windows.JOB_OBJECT_LIMIT_KILL_ON_JOB_CLOSE | windows.JOB_OBJECT_LIMIT_DIE_ON_UNHANDLED_EXCEPTION,
	}}
	var pin runtime.Pinner // the call takes a number, which does not move with the stack
	pin.Pin(limits)
	defer pin.Unpin()
	_, err = windows.SetInformationJobObject(j.object, windows.JobObjectExtendedLimitInformation, uintptr(unsafe.Pointer(limits)), uint32(unsafe.Sizeof(*limits)))
	return os.NewSyscallError("SetInformationJobObject", err)
}

// begin starts the program.
func (j *job) begin(path string, p Program) error {
	pi, err := j.create(path, p)
	if err != nil {
		return err
	}
	defer func() { _ = windows.CloseHandle(pi.Thread) }()
	j.process, j.pid = pi.Process, pi.ProcessId
	// The program holds the writing end of its own input: where this process is killed, it
	// would see the end of its input before it is killed itself, and take what it got for all.
	raw, err := j.stdin.ours.SyscallConn()
	if err != nil {
		return err
	}
	cerr := raw.Control(func(fd uintptr) {
		err = windows.DuplicateHandle(windows.CurrentProcess(), windows.Handle(fd), j.process, &j.input, 0, false, windows.DUPLICATE_SAME_ACCESS)
	})
	if err := errors.Join(cerr, err); err != nil {
		return os.NewSyscallError("DuplicateHandle", err)
	}
	_, err = windows.ResumeThread(pi.Thread)
	return os.NewSyscallError("ResumeThread", err)
}

// create makes the process, which does not run yet.
func (j *job) create(path string, p Program) (pi windows.ProcessInformation, err error) {
	name, err := windows.UTF16PtrFromString(path)
	if err != nil {
		return pi, err
	}
	line, err := commandLine(path, p.Args)
	if err != nil {
		return pi, err
	}
	env, err := environment(p.Env)
	if err != nil {
		return pi, err
	}
	block, err := environmentBlock(env)
	if err != nil {
		return pi, err
	}
	dir, err := directory(p.Dir)
	if err != nil {
		return pi, err
	}
	theirs := [3]windows.Handle{j.stdin.theirs, j.outputs[0].theirs, j.outputs[1].theirs}
	attributes, err := windows.NewProcThreadAttributeList(2)
	if err != nil {
		return pi, err
	}
	defer attributes.Delete()
	if err := errors.Join(
		attributes.Update(windows.PROC_THREAD_ATTRIBUTE_HANDLE_LIST, unsafe.Pointer(&theirs), unsafe.Sizeof(theirs)),
		attributes.Update(attributeJobList, unsafe.Pointer(&j.object), unsafe.Sizeof(j.object)),
	); err != nil {
		return pi, os.NewSyscallError("UpdateProcThreadAttribute", err)
	}
	si := windows.StartupInfoEx{ProcThreadAttributeList: attributes.List()}
	si.Cb, si.Flags = uint32(unsafe.Sizeof(si)), windows.STARTF_USESTDHANDLES
	si.StdInput, si.StdOutput, si.StdErr = theirs[0], theirs[1], theirs[2]
	err = windows.CreateProcess(name, line, nil, nil, true, j.flags(), &block[0], dir, &si.StartupInfo, &pi)
	return pi, os.NewSyscallError("CreateProcess", err)
}

// Privileged reports whether programs would have the rights of an administrator.
func Privileged() bool { return windows.GetCurrentProcessToken().IsElevated() }

// flags are those of CreateProcess.
func (j *job) flags() uint32 {
	flags := uint32(windows.CREATE_SUSPENDED | windows.CREATE_NEW_PROCESS_GROUP | windows.CREATE_UNICODE_ENVIRONMENT | windows.EXTENDED_STARTUPINFO_PRESENT)
	_, err := windows.GetConsoleCP()
	if j.console = err == nil; !j.console {
		flags |= windows.CREATE_NO_WINDOW // it would open one
	}
	return flags
}

// directory returns where a program runs: an absolute path, as the folder of a drive or of this
// process would be another.
func directory(dir string) (*uint16, error) {
	if len(dir) < 3 || dir[1] != ':' || !os.IsPathSeparator(dir[2]) {
		return nil, fmt.Errorf(`directory %q: want one on a drive, such as C:\Tools`, dir)
	}
	return windows.UTF16PtrFromString(dir)
}

// Signal sends Ctrl-Break: to one program, Windows has nothing else to send. A program that does
// not handle it ends.
func (j *job) Signal(name string) error {
	j.mu.Lock()
	defer j.mu.Unlock()
	switch {
	case name != "INT" && name != "TERM":
		return fmt.Errorf("signal %s: a program of Windows can get INT and TERM only", name)
	case !j.console:
		return fmt.Errorf("signal %s: the host peer has no console, without which Windows has no signals", name)
	case j.process == 0:
		return os.ErrProcessDone
	}
	j.sent = name
	return os.NewSyscallError("GenerateConsoleCtrlEvent", windows.GenerateConsoleCtrlEvent(windows.CTRL_BREAK_EVENT, j.pid))
}

// Kill implements Process.
func (j *job) Kill() {
	j.mu.Lock()
	defer j.mu.Unlock()
	if j.object != 0 {
		j.killed = true
		_ = windows.TerminateJobObject(j.object, killCode)
	}
}

// Wait implements Process.
func (j *job) Wait() (int, string, error) {
	var code uint32
	_, err := windows.WaitForSingleObject(j.process, windows.INFINITE)
	if err == nil {
		err = windows.GetExitCodeProcess(j.process, &code)
	}
	j.leave()
	err = errors.Join(err, j.end())
	for i := range j.output {
		j.output[i].finish()
	}
	_ = j.stdin.ours.SetWriteDeadline(time.Now()) // another process than the job's may hold the other end
	if err != nil {
		return 0, "", err
	}
	if name := j.signalOf(code); name != "" {
		return -1, name, nil
	}
	return int(code), "", nil
}

// leave closes the handle of the program, which has ended.
func (j *job) leave() {
	j.mu.Lock()
	defer j.mu.Unlock()
	if j.process != 0 {
		_ = windows.CloseHandle(j.process)
		j.process = 0
	}
}

// signalOf returns the name of the signal that ended the program, if one did.
func (j *job) signalOf(code uint32) string {
	j.mu.Lock()
	defer j.mu.Unlock()
	switch {
	case code == killCode && j.killed:
		return "KILL"
	case code != uint32(windows.STATUS_CONTROL_C_EXIT):
		return ""
	case j.sent != "":
		return j.sent
	}
	return "INT"
}

// end kills what the program started, and waits until it is gone.
func (j *job) end() error {
	if err := windows.TerminateJobObject(j.object, killCode); err != nil {
		return os.NewSyscallError("TerminateJobObject", err)
	}
	pause := time.Millisecond
	for start := time.Now(); ; pause = min(2*pause, 100*time.Millisecond) {
		n, err := j.processes()
		switch {
		case err != nil || n == 0:
			return err
		case time.Since(start) > goneTimeout:
			return errors.New("what the program started does not end, although it was killed")
		}
		time.Sleep(pause)
	}
}

// processes returns how many processes are in the job.
func (j *job) processes() (uint32, error) {
	a := new(accounting)
	var pin runtime.Pinner // as in prepare
	pin.Pin(a)
	defer pin.Unpin()
	err := windows.QueryInformationJobObject(j.object, windows.JobObjectBasicAccountingInformation, uintptr(unsafe.Pointer(a)), uint32(unsafe.Sizeof(*a)), nil)
	return a.active, os.NewSyscallError("QueryInformationJobObject", err)
}

// accounting is JOBOBJECT_BASIC_ACCOUNTING_INFORMATION.
type accounting struct {
	_      [4]int64 // times
	_      [2]uint32
	active uint32 // processes
	_      uint32
}

// Gone implements Process.
func (j *job) Gone() {
	for {
		if n, err := j.processes(); n == 0 || err != nil {
			return
		}
		time.Sleep(100 * time.Millisecond)
	}
}

// Close may be called when a part of the job is missing. What still runs is killed.
func (j *job) Close() {
	j.leave()
	j.mu.Lock()
	if j.object != 0 {
		_ = windows.CloseHandle(j.object)
		j.object = 0
	}
	j.mu.Unlock()
	for _, p := range []*pipe{&j.stdin, &j.outputs[0], &j.outputs[1]} {
		p.close()
	}
}

// input is the caller's end of a job's stdin.
type input struct{ j *job }

func (i input) Write(b []byte) (int, error) { return i.j.stdin.ours.Write(b) }

// Close gives the program the end of its input.
func (i input) Close() error {
	i.j.mu.Lock()
	defer i.j.mu.Unlock()
	var err error
	if i.j.process != 0 && i.j.input != 0 {
		var moved windows.Handle // wine needs a place for it
		err = windows.DuplicateHandle(i.j.process, i.j.input, windows.CurrentProcess(), &moved, 0, false, windows.DUPLICATE_CLOSE_SOURCE|windows.DUPLICATE_SAME_ACCESS)
		if err == nil {
			err = windows.CloseHandle(moved)
		}
		i.j.input = 0
	}
	return errors.Join(os.NewSyscallError("DuplicateHandle", err), i.j.stdin.ours.Close())
}
